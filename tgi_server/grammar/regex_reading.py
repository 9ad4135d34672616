"""Parses regular expressions of Rust's `regex` crate into trees, and defines the nodes of the trees.

llguidance has checked an expression before it is parsed here. It also computes what a class of characters contains.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tgi_server.grammar.errors import InvalidGrammar

# Code points of the characters that have to be escaped in a JSON string.
ESCAPED = frozenset(map(ord, '"\\')) | frozenset(range(0x20))


class Characters(NamedTuple):
    """One character of a set. plain: a regular expression of those that JSON does not escape; empty if there are none.

    escaped: the code points of those that JSON escapes.
    """

    plain: str
    escaped: frozenset[int]


class Sequenced(NamedTuple):
    parts: tuple[Any, ...]


class OneOf(NamedTuple):
    choices: tuple[Any, ...]


class Both(NamedTuple):
    """The texts that all of them match."""

    all: tuple[Any, ...]


class Without(NamedTuple):
    """All texts except these."""

    texts: Any


class Repeated(NamedTuple):
    item: Any
    low: int
    high: int | None


class Named(NamedTuple):
    name: str


class Lexeme(NamedTuple):
    """A terminal in a rule. Terminals that the grammar ignores may follow it."""

    terminal: Any


_IN_REGEX = re.compile(
    r"""(?P<open>\((?:\?P?<\w+>|\?(?P<scoped>[a-zA-Z-]*):)?) | \(\?(?P<flags>[a-zA-Z-]+)\)
    |(?P<close>\)) | (?P<bar>\|)
    |(?P<repeat>(?:[*+?]|\{\s*(?P<low>\d+)\s*(?:(?P<comma>,)\s*(?:(?P<high>\d+)\s*)?)?\})(?P<lazy>\??))
    |(?P<set>\[) | (?P<any>\.) | (?P<anchor>[$^])
    |(?P<escape>\\(?:[pP](?:\{[^}]*\}|.)|[xuU]\{[^}]*\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.))
    |(?P<literal>.)""",
    re.VERBOSE | re.DOTALL,
)
_IN_SET = re.compile(r"(?P<open>\[\^?\]?)|(?P<close>\])|\\.|[^\\\[\]]+", re.DOTALL)
BOUNDS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def read_regex(pattern: str, flags: str = "") -> Any:
    """Returns the tree of a regular expression. Raises InvalidGrammar for constructs that are not supported."""
    try:
        return _RegexReader(pattern, frozenset(flags)).whole()
    except InvalidGrammar as error:
        raise InvalidGrammar(f"{error} in the regular expression /{pattern[:100]}/") from None


class _RegexReader:
    def __init__(self, pattern: str, flags: frozenset[str]) -> None:
        self._pattern = pattern
        self._flags = flags
        self._at = 0

    def whole(self) -> Any:
        """Returns the tree up to the end of the group, or of the expression."""
        outer = self._flags
        self._check_flags()
        choices: list[list[Any]] = [[]]
        while (found := _IN_REGEX.match(self._pattern, self._at)) and not found["close"]:
            self._at = found.end()
            if found["bar"]:
                choices.append([])
            elif found["flags"]:
                self._set_flags(found["flags"])
            elif found["repeat"]:
                choices[-1].append(_repeated(choices[-1].pop(), found))
            else:
                choices[-1].append(self._atom(found))
        self._at += 1
        self._flags = outer
        return choice_of([sequence_of(parts) for parts in choices])

    def _atom(self, found: re.Match[str]) -> Any:
        if found["open"]:
            outer = self._flags
            self._set_flags(found["scoped"] or "")
            inner = self.whole()
            self._flags = outer
            return inner
        if found["anchor"]:
            raise InvalidGrammar(f"anchors are not supported ({found[0]})")
        kept = "".join(sorted(self._flags & {"i"}))
        if found["any"]:
            return characters(r"(?s:.)" if "s" in self._flags else ".")
        if found["set"]:
            return characters(self._set(found.start()), kept)
        return characters(found[0], kept)

    def _set(self, start: int) -> str:
        """Returns the set of characters that begins at `start`."""
        depth, at = 0, start
        while found := _IN_SET.match(self._pattern, at):
            at = found.end()
            depth += bool(found["open"]) - bool(found["close"])
            if depth == 0:
                break
        self._at = at
        return self._pattern[start:at]

    def _set_flags(self, written: str) -> None:
        on, _, off = written.partition("-")
        self._flags = (self._flags | frozenset(on)) - frozenset(off)
        if "u" in off:
            raise InvalidGrammar("the flag -u is not supported")
        self._check_flags()

    def _check_flags(self) -> None:
        if others := self._flags - {*"imsu"}:
            raise InvalidGrammar(f"the flag {min(others)} is not supported")


def _repeated(item: Any, found: re.Match[str]) -> Any:
    if found["lazy"]:
        raise InvalidGrammar(f"lazy repetitions are not supported ({found[0]})")
    if found[0] in BOUNDS:
        return Repeated(item, *BOUNDS[found[0]])
    low = int(found["low"])
    return Repeated(item, low, int(found["high"]) if found["high"] else None if found["comma"] else low)


def choice_of(found: Sequence[Any]) -> Any:
    """Returns a choice of nodes; a choice of single characters becomes one `Characters`."""
    if len(found) > 1 and all(isinstance(each, Characters) for each in found):
        plain = "|".join(each.plain for each in found if each.plain)
        return Characters(
            f"(?:{plain})" if "|" in plain else plain, frozenset().union(*(each.escaped for each in found))
        )
    return found[0] if len(found) == 1 else OneOf(tuple(found))


def sequence_of(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else Sequenced(tuple(parts))


def pattern_of(text: str) -> str:
    """Returns a regular expression that matches exactly this text."""
    return "".join(rf"\x{{{ord(each):x}}}" if each.isascii() and not each.isalnum() else each for each in text)


@lru_cache(10_000)
def characters(pattern: str, flags: str = "") -> Characters:
    """Returns the characters that a regular expression of a single character matches."""
    found = pattern if not flags else f"(?{flags}:{pattern})"
    if len(pattern) == 1 and pattern.isalnum():
        return Characters(found, frozenset())
    first = _first_bytes(found)
    escaped = first & ESCAPED
    if first == escaped:
        return Characters("", escaped)
    if not escaped:
        return Characters(found, escaped)
    inner = r"\x00-\x{10FFFF}" if pattern == "(?s:.)" else r"^\n" if pattern == "." else pattern
    plain = rf"[[{inner}]--[\x00-\x1f\x22\x5c]]"
    return Characters(plain if not flags else f"(?{flags}:{plain})", escaped)


def _first_bytes(pattern: str) -> frozenset[int]:
    """Returns the bytes with which the UTF-8 encoding of a match may begin."""
    lookup = _byte_tokenizer()
    matcher = LLMatcher(lookup, LLMatcher.grammar_from_lark(f"start: /{pattern}/"), log_level=0)
    mask = allocate_token_bitmask(1, lookup.vocab_size)
    fill_next_token_bitmask(matcher, mask)
    if matcher.is_error() and not matcher.get_error().startswith("NoExtension"):  # which no text matches
        raise InvalidGrammar(f"{pattern} cannot be read: {matcher.get_error()[:200]}")
    found = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))
    return frozenset(found.tolist()) & frozenset(range(256))


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    def __init__(self) -> None:
        self.eos_token_id, self.bos_token_id = 256, None
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>"]
        self.special_token_ids = [256]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@lru_cache(1)
def _byte_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
