"""The reasoning budget of one sequence."""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from llguidance import LLMatcher

from tgi_server.contract import ThoughtBudget
from tgi_server.grammar.constraint import Advance, Constraint


class LimitedThoughts:
    """Follows a text, and forces the end of its thoughts once their budget is used up.

    The texts before and after thoughts are recognized by their bytes: a model may spell them with other tokens than its
    tokenizer would. Attributes that a `Constraint` has as well come from the grammar, if there is one.

    grammar: the constraint of the whole text, thoughts included, or None. done: True if no further thought can follow.
    """

    def __init__(
        self,
        budget: ThoughtBudget,
        spelling: Callable[[int], bytes],
        grammar: Constraint | None,
        eos: Collection[int],
        generated_ids: Sequence[int],
        *,
        ignore_eos: bool,
    ) -> None:
        """spelling: returns the bytes of a token. eos: tokens that end a text without a grammar, unless `ignore_eos`.

        generated_ids: tokens generated before a preemption; the grammar has advanced by them already.
        """
        self.grammar = grammar
        self.done = False
        self._is_closing = False
        self._budget = budget
        self._left = budget.tokens
        self._begin, self._end = budget.begin.encode(), budget.end.encode()
        self._spelling = spelling
        self._ends = frozenset() if ignore_eos else frozenset(eos)
        self._thinking = budget.open
        self._ended = False
        self._text = b""  # the bytes since the answer, a thought or the closing began; of a long thought, the last few
        self._tokens: deque[int] = deque(maxlen=len(budget.closing))
        self._closing: deque[int] | None = None
        self._check_budget()
        for token in generated_ids:
            self._take(token)

    @property
    def free(self) -> bool:
        """True if any token may follow, so that no mask is needed."""
        return self.grammar is None and not self._closing

    @property
    def jump_forward(self) -> int | None:
        """The only token that may follow; None if several may, as given by the mask."""
        if self.grammar is not None and self.grammar.jump_forward is not None:
            return self.grammar.jump_forward
        if not self._closing:
            return None
        # In the middle of a character, a grammar requires the character's other bytes first.
        forced = self._closing[0]
        return forced if self.grammar is None or self.grammar.allowed([forced]) else None

    def allowed(self, tokens: Sequence[int]) -> int:
        """Returns the length of the longest prefix of `tokens` that may follow; 0 while a thought's end is forced."""
        if self._closing:
            return 0
        return len(tokens) if self.grammar is None else self.grammar.allowed(tokens)

    def advance(self, token: int, room: int) -> Advance:
        """Advances by a sampled token, and by at most `room` jump-forward tokens of the grammar after it."""
        advance = Advance() if self.grammar is None else self.grammar.advance(token, room)
        for each in (token, *advance.jump_forward):
            self._take(each)
        if self._is_closing and self.done and self.grammar is not None:
            self.grammar.close()
        return advance

    def close(self) -> None:
        """Forces the end of the thought, and after it the end of the text, if it has a grammar."""
        self._left, self._is_closing = 0, True
        if self.done and self.grammar is not None:
            self.grammar.close()
        self._check_budget()

    @property
    def ended(self) -> bool:
        """True if the last token ended the text."""
        return self._ended if self.grammar is None else self.grammar.ended

    @property
    def error(self) -> str | None:
        """The reason why the sequence cannot continue; None while it can."""
        return None if self.grammar is None else self.grammar.error

    @error.setter
    def error(self, error: str | None) -> None:
        assert self.grammar is not None
        self.grammar.error = error

    @property
    def matcher(self) -> LLMatcher:
        assert self.grammar is not None
        return self.grammar.matcher

    @property
    def eos(self) -> frozenset[int]:
        return self._ends if self.grammar is None else self.grammar.eos

    @property
    def ignore_eos(self) -> bool:
        return self.grammar is not None and self.grammar.ignore_eos

    def check(self) -> None:
        if self.grammar is not None:
            self.grammar.check()

    def _take(self, token: int) -> None:
        self._ended = token in self._ends
        if self.done:
            return
        self._tokens.append(token)
        self._text += self._spelling(token)
        if self._closing is not None:
            self._close(token)
        elif self._thinking:
            self._think()
        else:
            self._look_for_thought()
        self._check_budget()

    def _look_for_thought(self) -> None:
        """Starts a thought if the text begins with one. Sets `done` if it cannot."""
        self._text = self._text.lstrip()
        if self._text.startswith(self._begin):
            self._thinking, self._text = True, self._text.removeprefix(self._begin)
            self._tokens.clear()
        elif not self._begin.startswith(self._text):
            self.done = True

    def _think(self) -> None:
        _, end, rest = self._text.partition(self._end)
        if not end:
            self._left -= 1
            self._text = self._text[1 - len(self._end) :] if len(self._end) > 1 else b""
        elif self._budget.repeats:
            self._thinking, self._text = False, rest
            self._look_for_thought()
        else:
            self.done = True

    def _close(self, token: int) -> None:
        assert self._closing is not None
        if self._closing and token == self._closing[0]:
            self._closing.popleft()
        # A grammar may have spelled the end with other tokens.
        if not self._closing or (self.grammar is not None and self._end in self._text):
            self._closing.clear()
            self.done = True

    def _check_budget(self) -> None:
        """Begins to close the thought once its budget is used up. Skips closing tokens that the model has written."""
        if self.done or not self._thinking or self._left > 0 or self._closing is not None:
            return
        closing, tokens = self._budget.closing, list(self._tokens)
        most = min(len(closing) - 1, len(tokens))
        written = next((size for size in range(most, 0, -1) if tuple(tokens[-size:]) == closing[:size]), 0)
        self._closing = deque(closing[written:])
