"""One sequence's text, and the rest of its grammar."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from tgi_server.grammar.closing import ClosingOrder, closing_tokens
from tgi_server.grammar.errors import reason


@dataclass(frozen=True, slots=True)
class JumpForward:
    """A token that the grammar leaves no choice about. hidden: the model sees it, but no reader of the text."""

    token: int
    hidden: bool = False


@dataclass(slots=True)
class Advance:
    """The result of taking a token.

    jump_forward: tokens that were taken after it. hidden: the places of hidden tokens; 0 is the token itself.
    """

    jump_forward: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)


class Constraint:
    """Walks through a grammar token by token.

    Where the grammar leaves one continuation, llguidance says which tokens the model's tokenizer would make of it,
    as far as that is certain. These jump-forward tokens wait in a queue, and the matcher has already consumed them:
    the text and its tokens are the same when they are taken together and when they are taken one at a time. The same
    queue holds the tokens of hints, and the end-of-sequence token once nothing else can follow.

    matcher: computes the mask of the next token, unless there is a jump-forward token. free: never True: a grammar
    always restricts its text.
    error: the reason why the sequence cannot continue; None while it can. ended: the last token ended the text.
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
        """matcher: this sequence's own. hints: tokens by the marker that they stand for. eos: the first is preferred.

        max_new_tokens: maximum number of tokens of the sequence, hints included. ignore_eos: the text goes on for
        as long as the grammar lets it. closing: ranks tokens for `close`. on_fault: called when the matcher has failed.
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
        """The only token that may follow; None where the mask says which may."""
        return self._queue[0].token if self._queue else None

    def replay(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were generated before."""
        for token in tokens:
            self._take(token)

    def allowed(self, tokens: Sequence[int]) -> int:
        """Returns how many of the tokens may follow, one after the other. Where another is forced, none may."""
        if self._queue or self.error is not None:
            return 0
        return self.matcher.validate_tokens(list(tokens))

    def advance(self, token: int, room: int) -> Advance:
        """Takes a token that was chosen, and at most `room` jump-forward tokens after it; the end needs no room."""
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
        """Has the text end with few tokens, so that it matches the grammar; does nothing if none are found.

        They are jump-forward tokens. Later calls do nothing.
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
        """Notes what went wrong while the mask was computed."""
        if self.error is None and self.matcher.is_error():
            self.error = reason(self.matcher.get_error())
            self._on_fault()

    def _take(self, token: int) -> bool:
        """Returns True if the token is hidden."""
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
        """Fills the queue with what must come next."""
        while following := self._only_continuation():
            for token in following:
                self._append(token)
        self.check()
        if self.error is None and self.matcher.is_stopped():
            self._queue.append(JumpForward(self._first_eos))

    def _only_continuation(self) -> list[int]:
        """Takes and returns the tokens that must come next; none where there is a choice, or after an error."""
        following = self.matcher.compute_ff_tokens()
        if following:
            self.matcher.consume_tokens(following)
        return following or self._marker()

    def _marker(self) -> list[int]:
        """Takes and returns the marker that must come next, for tokenizers without jump-forward tokens."""
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
