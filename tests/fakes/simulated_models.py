"""Models in simulated time, and an oracle that knows how long each answer is.

The oracle gives a model each call for which all calls that it has are in time.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from llm_functionalities.endpoint.balancer import GENERATE
from llm_functionalities.endpoint.pace import Work

# Seconds on the way from a model to the caller.
DELIVERY = 0.03


@dataclass(frozen=True)
class Call:
    number: int
    at: float
    seconds: float
    characters: int
    max_tokens: int
    tokens: int

    @property
    def deadline(self) -> float:
        return self.at + self.seconds - DELIVERY

    @property
    def work(self) -> Work:
        return Work(GENERATE, self.characters, self.max_tokens)


@dataclass
class Model:
    """A model that computes a batch of up to `places` answers in steps; others wait for their turn.

    step, row, character: seconds of a step, more for each answer, and for each character of a prompt. slow: times
    between which it takes three times as long.
    """

    step: float
    row: float
    character: float
    places: int
    slow: tuple[float, float] = (0.0, 0.0)
    now: float = 0.0
    # Call, tokens left, and characters left.
    rows: list[list[float]] = field(default_factory=list)
    calls: dict[int, Call] = field(default_factory=dict)

    def add(self, call: Call, now: float) -> None:
        self.now = self.now if self.rows else max(self.now, now)
        self.calls[call.number] = call
        self.rows.append([call.number, call.tokens, call.characters])

    def cancel(self, number: int) -> None:
        self.rows = [row for row in self.rows if row[0] != number]

    def advance(self) -> list[Call]:
        """Computes a step. Returns the calls that are answered with it."""
        batch = self.rows[: self.places]
        seconds = self.step + sum(self.row + self.character * row[2] for row in batch)
        self.now += seconds * (3 if self.slow[0] <= self.now < self.slow[1] else 1)
        for row in batch:
            row[1:] = row[1] - 1, 0
        self.rows = [row for row in self.rows if row[1] > 0]
        return [self.calls[int(row[0])] for row in batch if row[1] <= 0]


def oracle(model: Model, calls: Sequence[Call]) -> int:
    """Returns how many calls the model answers in time."""

    def in_time(model: Model) -> bool:
        rest = copy.deepcopy(model)
        while rest.rows:
            if any(rest.now > call.deadline for call in rest.advance()):
                return False
        return True

    taken = 0
    for call in calls:
        while model.rows and model.now < call.at:
            model.advance()
        tried = copy.deepcopy(model)
        tried.add(call, call.at)
        if in_time(tried):
            model, taken = tried, taken + 1
    return taken
