"""One sequence's text and what it still has to match."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from llguidance import LLMatcher

from tgi_server.engine.grammar.errors import reason


@dataclass(frozen=True, slots=True)
class Forced:
    """A token that there is no choice about. hidden: the model sees it, whoever reads the text does not."""

    token: int
    hidden: bool = False


@dataclass(slots=True)
class Advance:
    """What follows from a token. following: forced tokens taken along with it. hidden: which of all are; 0: itself."""

    following: list[int] = field(default_factory=list)
    hidden: list[int] = field(default_factory=list)


class Constraint:
    """Walks through a grammar token by token.

    Where the grammar leaves one continuation, llguidance says which tokens the model's tokenizer would make of it,
    as far as that is certain. They wait in a queue, at which the matcher already stands behind: whether they are
    appended many at once or chosen one at a time makes no difference to the text or its tokens. The same queue holds
    the tokens of hints, and the end-of-sequence token once nothing else can follow.

    error: why the sequence cannot go on; None while it can. ended: whether the last token said that the text is whole.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        hints: Mapping[int, list[int]],
        eos: Sequence[int],
        max_new_tokens: int,
        *,
        ignore_eos: bool,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        """matcher: this sequence's own. hints: tokens by the marker that they stand for. eos: the first is preferred.

        max_new_tokens: after which the sequence ends in any case, hints included. ignore_eos: whether the text goes on
        for as long as the grammar lets it. on_fault: called when the matcher has failed.
        """
        self.error: str | None = None
        self.ended = False
        self.eos = frozenset(eos)
        self.ignore_eos = ignore_eos
        self._first_eos = eos[0]
        self._matcher = matcher
        self._hints = hints
        self._on_fault = on_fault
        self._left = max_new_tokens
        self._queue: deque[Forced] = deque()
        self._look_ahead()

    @property
    def matcher(self) -> LLMatcher:
        """Whose mask says what may follow, unless a token is forced."""
        return self._matcher

    @property
    def forced(self) -> int | None:
        """The only token that may follow; None: the mask says."""
        return self._queue[0].token if self._queue else None

    def replay(self, tokens: Sequence[int]) -> None:
        """Takes tokens that were generated before."""
        for token in tokens:
            self._take(token)

    def advance(self, token: int, room: int) -> Advance:
        """Takes a token that was chosen, and at most `room` forced ones behind it; the end needs no room."""
        advance = Advance()
        if self._take(token):
            advance.hidden.append(0)
        while self._queue and self._left > 0 and self.error is None:
            if len(advance.following) >= room and self._queue[0].token not in self.eos:
                break
            following = self._queue[0].token
            advance.following.append(following)
            if self._take(following):
                advance.hidden.append(len(advance.following))
        return advance

    def check(self) -> None:
        """Notes what went wrong while the mask was computed."""
        if self.error is None and self._matcher.is_error():
            self.error = reason(self._matcher.get_error())
            self._on_fault()

    def _take(self, token: int) -> bool:
        """Whether the token is hidden."""
        if self.error is not None:
            return False
        self._left -= 1
        if self._queue:
            forced = self._queue.popleft()
            if forced.token != token:
                self.error = f"token {token} came where the grammar wants token {forced.token}"
            self.ended = token in self.eos
            return forced.hidden
        if self._matcher.consume_token(token):
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
        if self.error is None and self._matcher.is_stopped():
            self._queue.append(Forced(self._first_eos))

    def _only_continuation(self) -> list[int]:
        """What must come next, already taken; nothing where there is a choice, or after an error."""
        following = self._matcher.compute_ff_tokens()
        if following:
            self._matcher.consume_tokens(following)
        return following or self._marker()

    def _marker(self) -> list[int]:
        """The marker that must come next, for tokenizers of which llguidance does not say what is forced."""
        for marker in self._hints:
            if self._matcher.try_consume_tokens([marker]):
                return [marker]
        return []

    def _append(self, token: int) -> None:
        hint = self._hints.get(token)
        if hint is None:
            self._queue.append(Forced(token))
        elif self._left - len(self._queue) > len(hint):
            # Hints count as generated tokens; one that leaves no room for anything behind it is not shown.
            self._queue.extend(Forced(each, hidden=True) for each in hint)
