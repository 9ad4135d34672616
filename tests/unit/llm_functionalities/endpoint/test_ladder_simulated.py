"""500 calls in bursts to a large and a small model, in simulated time, compared with an oracle.

The oracle knows how long each answer is and how fast the large model computes; the ladder, what earlier answers took.
"""

import heapq
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from llm_functionalities.endpoint.balancer import GENERATE, Balancer
from llm_functionalities.endpoint.hedging import Hedging
from llm_functionalities.endpoint.ladder import Ladder, LadderModel
from llm_functionalities.endpoint.pace import ModelPace, Running, Work
from tests.fakes.simulated_models import Call, Model, oracle

CALLS = 500


def bursts(seed: int) -> list[Call]:
    """Returns calls that come alone and in bursts of up to 12, most of whose answers end before their limit."""
    draw, now, calls = random.Random(seed), 0.0, []
    while len(calls) < CALLS:
        now += draw.expovariate(1 / 3)
        for _ in range(draw.choice((1, 1, 1, 2, 4, 12))):
            limit = draw.choice((32, 64, 128))
            tokens = int(limit * draw.choice((1, 1, 0.8, 0.5, 0.3)))
            seconds = draw.choice((1.5, 3.0, 6.0, 10.0))
            calls.append(Call(0, now + 0.3 * draw.random(), seconds, draw.randint(200, 2000), limit, tokens))
    calls.sort(key=lambda call: call.at)
    return [Call(number, *list(vars(call).values())[1:]) for number, call in enumerate(calls[:CALLS])]


def large(slow: tuple[float, float] = (0.0, 0.0)) -> Model:
    return Model(0.03, 0.004, 0.0001, 8, slow)


def small() -> Model:
    return Model(0.004, 0.0005, 0.00001, 16)


class Simulation:
    """Calls that the ladder sends to two models. in_time: by model."""

    def __init__(self, *models: Model) -> None:
        self.now = 0.0
        self.models = models
        self.in_time = [0, 0]
        paces = [ModelPace(lambda: self.now) for _ in models]
        self._named = [LadderModel(str(place), Balancer([]), pace) for place, pace in enumerate(paces)]
        self._ladder = Ladder(self._named, Hedging(None, count=lambda _: None), lambda _, __: None, lambda _: None)
        self._running: dict[int, dict[int, Running]] = {}

    def run(self, calls: Sequence[Call]) -> None:
        order = itertools.count()
        due = [(call.at, next(order), call, False) for call in calls]
        while due:
            at, _, call, late = heapq.heappop(due)
            self._compute(at)
            self.now = at
            left = call.deadline - at
            if late:
                if call.number in self._running:
                    self._send(1, call)
            elif (chosen := self._ladder.choose(call.work, left)) is self._named[0]:
                self._send(0, call)
                after = self._ladder.fallback_after(call.work, left, chosen)
                heapq.heappush(due, (at + after, next(order), call, True))
            else:
                self._send(1, call)
        self._compute(float("inf"))

    def _send(self, place: int, call: Call) -> None:
        self.models[place].add(call, self.now)
        self._running.setdefault(call.number, {})[place] = self._named[place].pace.began(call.work)

    def _compute(self, until: float) -> None:
        for place, ended in self._steps(until):
            for call in ended:
                attempts = self._running.pop(call.number)
                self._named[place].pace.ended(attempts.pop(place), call.tokens)
                for other, attempt in attempts.items():
                    self.models[other].cancel(call.number)
                    self._named[other].pace.ended(attempt, None)
                self.in_time[place] += self.now <= call.deadline

    def _steps(self, until: float) -> Iterator[tuple[int, list[Call]]]:
        """Yields the calls that are answered, with the place of the model, in the order of time."""
        while busy := [place for place, model in enumerate(self.models) if model.rows]:
            place = min(busy, key=lambda place: self.models[place].now)
            if self.models[place].now >= until:
                return
            ended = self.models[place].advance()
            self.now = self.models[place].now
            yield place, ended


@pytest.mark.parametrize(
    ("slow", "in_time", "share"),
    [((0.0, 0.0), 0.99, 0.95), ((60.0, 200.0), 0.98, 0.85)],
    ids=["steady", "slower for a while"],
)
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 13))])
def test_nearly_all_calls_are_in_time_and_nearly_as_many_by_the_large_model_as_an_oracle_gets(
    seed: int, slow: tuple[float, float], in_time: float, share: float
) -> None:
    """share: of the calls that the oracle has the large model answer in time.

    The oracle's own number depends on chance: with seeds 1 to 12 the shares of a steady model are 0.89 to 1.17, and
    half of them above 1.04.
    """
    calls = bursts(seed)
    simulation = Simulation(large(slow), small())
    simulation.run(calls)
    possible = oracle(large(slow), calls)
    print(f"in time: {sum(simulation.in_time)}; by the large model: {simulation.in_time[0]}; the oracle: {possible}")
    assert sum(simulation.in_time) >= in_time * CALLS
    assert simulation.in_time[0] >= (share if seed == 1 else 0.85) * possible
    assert 0.3 * CALLS < possible < 0.7 * CALLS  # it cannot answer all of them


def test_the_first_calls_ask_each_model_and_a_model_that_nobody_asks_is_tried_again() -> None:
    now = [0.0]
    pace = ModelPace(lambda: now[0])
    work = Work(GENERATE, 100, 50)
    attempts = []
    for _ in range(3):
        assert pace.seconds(work, 0.7) is None
        attempts.append(pace.began(work))
    assert pace.seconds(work, 0.7) == float("inf")
    now[0] = 2.0
    for attempt in attempts:
        pace.ended(attempt, 50)
    assert pace.seconds(work, 0.7) == pytest.approx(2.0, rel=0.3)
    now[0] += 10.0
    assert pace.seconds(work, 0.7) == pytest.approx(2.0, rel=0.3)
    assert pace.seconds(work, 0.7, fades=True) == pytest.approx(1.0, rel=0.3)


def test_a_pace_grows_with_the_answer_and_the_load_and_counts_what_was_cancelled_late() -> None:
    now = [0.0]
    pace = ModelPace(lambda: now[0])
    for turn in range(60):
        size = (20, 40, 80)[turn % 3]
        beside = [pace.began(Work(GENERATE, 100, size)) for _ in range(1 + turn % 4)]
        now[0] += 0.01 * size * (1 + 0.5 * (len(beside) - 1))
        for attempt in beside:
            pace.ended(attempt, size)
    one, other = (pace.seconds(Work(GENERATE, 100, size), 0.0) for size in (20, 80))
    assert (one, other) == (pytest.approx(0.2, rel=0.05), pytest.approx(0.8, rel=0.05))
    before = pace.seconds(Work(GENERATE, 100, 80), 0.9)
    busy = [pace.began(Work(GENERATE, 100, 80)) for _ in range(3)]
    assert pace.seconds(Work(GENERATE, 100, 80), 0.0) == pytest.approx(0.8 * 2.5, rel=0.05)
    now[0] += 20.0
    for attempt in busy:
        pace.ended(attempt, None)
    after = pace.seconds(Work(GENERATE, 100, 80), 0.9)
    assert before is not None
    assert after is not None
    assert after > before
    failed = pace.began(Work(GENERATE, 100, 80))
    now[0] += 50.0
    pace.ended(failed, None, failed=True)
    assert pace.seconds(Work(GENERATE, 100, 80), 0.9) == after
