"""Finds few tokens that complete a text so that it matches its grammar, for a text that has to end soon."""

from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

Ranks = NDArray[np.int64]

_CLOSERS, _COMMA, _QUOTE = b"}])", b",", b'"'
# Rank of tokens whose spelling says nothing about how soon they end a text.
_OTHERS = 8
# First bytes of the tokens that have other ranks: few of a large vocabulary.
_RANKED = frozenset(b"%c" % byte for byte in b'}]),"0123456789ntf[{')
# If the grammar allows at most this many tokens, each of them is tried.
_FEW = 12
_NEVER = 2**40


class ClosingOrder:
    """Ranks a model's tokens by how soon they are likely to end a text, above all JSON.

    Where the grammar allows letters, as inside strings, quotation marks come first; elsewhere closing brackets do.
    """

    def __init__(self, spellings: Sequence[bytes]) -> None:
        """spellings: the bytes of each token."""
        self._letters = [token for token, text in enumerate(spellings) if text in (b"a", b"z")]
        lengths = np.fromiter((len(text) for text in spellings), np.int64)
        ranked = [(token, text) for token, text in enumerate(spellings) if text[:1] in _RANKED]
        within, outside = (np.full(len(lengths), _OTHERS, np.int64) for _ in range(2))
        for token, text in ranked:
            within[token], outside[token] = _rank_within(text), _rank_outside(text)
        self._others = (outside == _OTHERS) & (within == _OTHERS)
        # Among the other tokens, the longest or the shortest may lead to an end sooner: there is an order for each.
        self._orders = [
            (_order(within, lengths, longest=longest), _order(outside, lengths, longest=longest))
            for longest in (True, False)
        ]

    def __len__(self) -> int:
        return len(self._orders)

    def is_other(self, token: int) -> bool:
        """Returns True for a token whose spelling says nothing about how soon it ends a text."""
        return bool(self._others[token])

    def best(self, allowed: NDArray[np.bool_], attempt: int) -> int:
        """Returns the best allowed token. allowed: [vocab_size]. attempt: index of one of the len(self) orders."""
        within, outside = self._orders[attempt]
        ranks = within if allowed[self._letters].any() else outside
        return int(np.where(allowed[: len(ranks)], ranks, _NEVER).argmin())


def closing_tokens(matcher: LLMatcher, order: ClosingOrder, most: int, markers: Collection[int]) -> list[int] | None:
    """Returns at most `most` tokens that complete the text; None if none were found. Does not change the matcher.

    markers: token ids of hints, which the grammar requires in certain places.
    """
    found: list[int] | None = None
    for attempt in range(len(order)):
        limit = most if found is None else len(found) - 1
        found = _follow(matcher.deep_copy(), order, attempt, limit, markers) or found
    return found


def _follow(
    matcher: LLMatcher, order: ClosingOrder, attempt: int, most: int, markers: Collection[int]
) -> list[int] | None:
    taken: list[int] = []
    while len(taken) <= most and not matcher.is_error():
        if matcher.is_stopped() or matcher.is_accepting():
            return taken
        if following := matcher.compute_ff_tokens():
            matcher.consume_tokens(following)
        elif marker := next((each for each in markers if matcher.try_consume_tokens([each])), None):
            following = [marker]
        else:
            allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").view(
                np.bool_
            )
            token = order.best(allowed, attempt)
            if order.is_other(token) and allowed.sum() <= _FEW:
                token = _shortest(matcher, allowed)
            if not allowed[token] or not matcher.consume_token(token):
                return None
            following = [token]
        taken += following
    return None


def _shortest(matcher: LLMatcher, allowed: NDArray[np.bool_]) -> int:
    """Returns the token with the fewest jump-forward tokens after it, such as the first of the shortest enum value."""

    def forced(token: int) -> tuple[bool, int]:
        if not matcher.consume_token(token):
            return True, 0
        length = 0 if matcher.is_accepting() else len(matcher.compute_ff_tokens())
        matcher.rollback(1)
        return False, length

    return min(map(int, np.flatnonzero(allowed)), key=forced)


def _order(ranks: Ranks, lengths: Ranks, *, longest: bool) -> Ranks:
    """Returns ranks in which the length decides among equals.

    Among ranked tokens the longest is first; among the others the longest or the shortest, as `longest` says.
    """
    others = ranks == _OTHERS
    preference = np.where(others & (not longest), lengths, 1000 - lengths)
    return ranks * 10_000 + preference


def _rank_within(text: bytes) -> int:
    """Returns the rank of a token inside a string."""
    if not text.startswith(_QUOTE):
        return _OTHERS
    return 0 if all(byte in _CLOSERS for byte in text[1:]) else 2


def _rank_outside(text: bytes) -> int:
    """Returns the rank of a token outside of strings."""
    if text and all(byte in _CLOSERS for byte in text):
        return 0
    if text.startswith(_COMMA):
        return 1
    if text.startswith(_QUOTE):
        return {2: 2, 1: 3}.get(text.count(_QUOTE), 7) if all(byte in _CLOSERS + _QUOTE for byte in text) else 7
    if text in (b"0", b"1"):
        return 4
    if text in (b"null", b"true", b"false", b"[]", b"{}"):
        return 5
    return 6 if text.isdigit() else _OTHERS
