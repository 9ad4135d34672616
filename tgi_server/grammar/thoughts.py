"""The budget of one sequence's thoughts."""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from llguidance import LLMatcher

from tgi_server.contract import ThoughtBudget
from tgi_server.grammar.constraint import Advance, Constraint


class LimitedThoughts:
    """Follows a text, and forces the end of its thoughts once their budget is used up.

    The texts around thoughts are recognized by their bytes: a model may spell them with other tokens than its tokenizer
    would. Members that a `Constraint` has too are the grammar's, if there is one.

    grammar: of the whole text, thoughts included; None: there is none. done: no thought can follow.
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

        generated_ids: tokens from before a preemption, which the grammar has taken already.
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
        self._text = b""  # since the answer, a thought or the closing began; of long ones the end
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
        """The only token that may follow; None where the mask says which may."""
        if self.grammar is not None and self.grammar.jump_forward is not None:
            return self.grammar.jump_forward
        if not self._closing:
            return None
        # In the middle of a character, a grammar requires the rest of it first.
        forced = self._closing[0]
        return forced if self.grammar is None or self.grammar.allowed([forced]) else None

    def allowed(self, tokens: Sequence[int]) -> int:
        """Returns how many of the tokens may follow, one after the other. Where another is forced, none may."""
        if self._closing:
            return 0
        return len(tokens) if self.grammar is None else self.grammar.allowed(tokens)

    def advance(self, token: int, room: int) -> Advance:
        """Takes a token that was chosen, and at most `room` jump-forward tokens of the grammar after it."""
        advance = Advance() if self.grammar is None else self.grammar.advance(token, room)
        for each in (token, *advance.jump_forward):
            self._take(each)
        if self._is_closing and self.done and self.grammar is not None:
            self.grammar.close()
        return advance

    def close(self) -> None:
        """Has the thought end now, and then the text, if it has a grammar."""
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
        """Finds out whether the text begins with a thought."""
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
        """Begins to close the thought once its budget is used up, after what the model has written of the end."""
        if self.done or not self._thinking or self._left > 0 or self._closing is not None:
            return
        closing, tokens = self._budget.closing, list(self._tokens)
        most = min(len(closing) - 1, len(tokens))
        written = next((size for size in range(most, 0, -1) if tuple(tokens[-size:]) == closing[:size]), 0)
        self._closing = deque(closing[written:])
