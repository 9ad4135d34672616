"""The grammar of one sequence: which tokens may follow, and which must."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from tgi_server.grammar.closing import ClosingOrder, closing_tokens
from tgi_server.grammar.errors import reason


@dataclass(frozen=True, slots=True)
class JumpForward:
    """A token that the grammar forces. hidden: part of a hint, which the model sees and the response does not have."""

    token: int
    hidden: bool = False


@dataclass(slots=True)
class Advance:
    """The result of advancing by a token.

    jump_forward: the jump-forward tokens after it. hidden: positions of hidden tokens: 0 is the token itself, 1 is the
    first of `jump_forward`.
    """

    jump_forward: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)


class Constraint:
    """Follows a grammar token by token.

    Where the grammar allows only one continuation, llguidance returns the tokens into which the model's tokenizer would
    split it, as far as that is certain. These jump-forward tokens wait in a queue; the matcher has consumed them
    already. So the text and its tokens do not depend on whether they are taken together or one at a time. The queue
    also holds the tokens of hints, and the end-of-sequence token once nothing else can follow.

    matcher: computes the mask of the next token, if there is no jump-forward token. free: always False, as every token
    needs a mask; see `LimitedThoughts.free`.
    error: the reason why the sequence cannot continue; None while it can. ended: True if the last token ended the text.
    """

    free = False

    def __init__(
        self,
        matcher: LLMatcher,
        hints: Mapping[int, list[int]],
        eos: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool,
        closing: ClosingOrder | None = None,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        """matcher: this sequence's copy. hints: the tokens of each hint, by its marker. eos: the first one is forced.

        max_new_tokens: maximum number of tokens of the sequence, hints included. ignore_eos: True lets the text
        continue for as long as the grammar allows. closing: ranks tokens for `close`; None disables `close`. on_fault:
        called when the matcher has failed.
        """
        self.error: str | None = None
        self.ended = False
        self.eos = frozenset(eos)
        self.ignore_eos = ignore_eos
        self._first_eos = eos[0]
        self.matcher = matcher
        self._hints = hints
        self._on_fault = on_fault
        self._left = max_new_tokens
        self._closing = closing
        self._queue: deque[JumpForward] = deque()
        self._look_ahead()

    @property
    def jump_forward(self) -> int | None:
        """The only token that may follow; None if several may, as given by the mask."""
        return self._queue[0].token if self._queue else None

    def replay(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were generated before."""
        for token in tokens:
            self._take(token)

    def allowed(self, tokens: Sequence[int]) -> int:
        """Returns the length of the longest prefix of `tokens` that may follow; 0 while a jump-forward token waits."""
        if self._queue or self.error is not None:
            return 0
        return self.matcher.validate_tokens(list(tokens))

    def advance(self, token: int, room: int) -> Advance:
        """Advances by a sampled token and at most `room` jump-forward tokens; end-of-sequence does not count."""
        advance = Advance()
        if self._take(token):
            advance.hidden.append(0)
        while self._queue and self._left > 0 and self.error is None:
            if len(advance.jump_forward) >= room and self._queue[0].token not in self.eos:
                break
            following = self._queue[0].token
            advance.jump_forward.append(following)
            if self._take(following):
                advance.hidden.append(len(advance.jump_forward))
        return advance

    def close(self) -> None:
        """Queues a few jump-forward tokens that complete the text so that it matches the grammar.

        Does nothing if none are found, or if the text is ending already.
        """
        if self._closing is None or self.error is not None or self.ended or self._is_ending:
            return
        tokens = closing_tokens(self.matcher, self._closing, self._left - len(self._queue) - 1, self._hints)
        if tokens is None:
            return
        self.matcher.consume_tokens(tokens)
        for token in tokens:
            self._append(token)
        self._queue.append(JumpForward(self._first_eos))

    @property
    def _is_ending(self) -> bool:
        return bool(self._queue) and self._queue[-1].token == self._first_eos

    def check(self) -> None:
        """Sets `error` if the matcher has failed, as it may while a mask is computed."""
        if self.error is None and self.matcher.is_error():
            self.error = reason(self.matcher.get_error())
            self._on_fault()

    def _take(self, token: int) -> bool:
        """Advances by one token. Returns True if it is hidden."""
        if self.error is not None:
            return False
        self._left -= 1
        if self._queue:
            expected = self._queue.popleft()
            if expected.token != token:
                self.error = f"token {token} came where the grammar requires token {expected.token}"
            self.ended = token in self.eos
            return expected.hidden
        if self.matcher.consume_token(token):
            self.ended = token in self.eos
            if not self.ended:
                self._look_ahead()
        else:
            self.check()
        return False

    def _look_ahead(self) -> None:
        """Fills the queue with the tokens that must come next."""
        while following := self._only_continuation():
            for token in following:
                self._append(token)
        self.check()
        if self.error is None and self.matcher.is_stopped():
            self._queue.append(JumpForward(self._first_eos))

    def _only_continuation(self) -> list[int]:
        """Consumes and returns the tokens that must come next; none if there is a choice, or after an error."""
        following = self.matcher.compute_ff_tokens()
        if following:
            self.matcher.consume_tokens(following)
        return following or self._marker()

    def _marker(self) -> list[int]:
        """Consumes and returns the marker that must come next, for tokenizers without jump-forward tokens."""
        for marker in self._hints:
            if self.matcher.try_consume_tokens([marker]):
                return [marker]
        return []

    def _append(self, token: int) -> None:
        hint = self._hints.get(token)
        if hint is None:
            self._queue.append(JumpForward(token))
        elif self._left - len(self._queue) > len(hint):
            # Hints count as generated tokens; one that leaves no room for anything after it is not shown.
            self._queue.extend(JumpForward(each, hidden=True) for each in hint)
