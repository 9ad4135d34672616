import random
from collections import Counter

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tgi_server import demo_model
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.speculation.costs import StepCosts, measure_rows

# Milliseconds by tokens: up to eight cost what one does, from there on each costs as much.
FLAT_TO_EIGHT = StepCosts(*[{1: 10.0, 8: 10.0, 16: 20.0, 64: 80.0}] * 2)


def test_where_tokens_cost_nothing_all_are_checked() -> None:
    assert FLAT_TO_EIGHT.worth([5], [0.1], rows=1, expected=1) == [5]


def test_tokens_that_cost_more_than_they_bring_are_left_out() -> None:
    assert FLAT_TO_EIGHT.worth([12], [0.9], rows=1, expected=1) == [7]
    assert FLAT_TO_EIGHT.worth([3] * 8, [0.5] * 8, rows=8, expected=8) == [0] * 8
    assert FLAT_TO_EIGHT.worth([3] * 64, [0.9] * 64, rows=64, expected=64) == [0] * 64


def test_the_surer_drafts_come_first() -> None:
    assert FLAT_TO_EIGHT.worth([4, 4], [0.3, 0.9], rows=4, expected=4) == [0, 4]


def test_a_dear_first_token_is_taken_for_the_sake_of_more() -> None:
    costs = StepCosts({1: 10.0}, {2: 19.0, 8: 19.5})
    assert costs.worth([1], [0.8], rows=1, expected=1) == [0]
    assert costs.worth([7], [0.8], rows=1, expected=1) == [7]


def test_steps_with_drafts_may_cost_more() -> None:
    same, dearer = {1: 10.0, 64: 12.0}, {2: 30.0, 64: 32.0}
    assert StepCosts(same, same).worth([1], [0.5], rows=1, expected=1) == [1]
    assert StepCosts(same, dearer).worth([1], [0.5], rows=1, expected=1) == [0]


@given(
    without=st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), st.floats(1, 5), min_size=1),
    with_drafts=st.dictionaries(st.sampled_from([2, 4, 8, 16]), st.floats(1, 5), min_size=1),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    rows=st.integers(1, 20),
    data=st.data(),
)
def test_no_draft_is_worth_it_up_to_the_least_chance(
    without: dict[int, float], with_drafts: dict[int, float], lengths: list[int], rows: int, data: st.DataObject
) -> None:
    costs = StepCosts(without, with_drafts)
    least = costs.least_chance(rows, len(lengths), 6 * len(lengths))
    assume(abs(least - 1) > 1e-6)
    if least > 1e-6:
        below = st.floats(0, min(1, least - 1e-6))
        chances = data.draw(st.lists(below, min_size=len(lengths), max_size=len(lengths)))
        assert not any(costs.worth(lengths, chances, rows, len(lengths)))
    sure = costs.worth([6] * len(lengths), [1.0] * len(lengths), rows, len(lengths))
    assert any(sure) is (least < 1)


def test_drafts_that_have_to_be_computed_are_worth_their_own_time_too() -> None:
    for seconds, worth in ((0.0, 7), (3.0, 5), (20.0, 0)):
        assert FLAT_TO_EIGHT.worth([7], [0.9], 1, 1, drafting=lambda tokens, each=seconds: each * tokens) == [worth]


def test_a_measurement_that_was_held_up_does_not_count() -> None:
    costs = StepCosts({1: 90.0, 2: 10.0}, {2: 10.0, 4: 90.0, 8: 20.0})
    assert costs.worth([3], [0.9], rows=1, expected=1) == StepCosts({1: 10.0}, {2: 10.0, 4: 20.0}).worth(
        [3], [0.9], rows=1, expected=1
    )


class Rounds:
    """Computes rows in a time of its own, each in a millisecond, and is held up by as much as 20 rows take.

    held_up: the probability of that. times: how often it computed each number of rows.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held_up: float, seed: int = 0) -> None:
        self._held_up = held_up
        self._random = random.Random(seed)
        self._now = 0.0
        self.times = Counter[int]()
        monkeypatch.setattr("tgi_server.engine.speculation.costs.time.perf_counter", lambda: self._now)

    def compute(self, rows: int) -> torch.Tensor:
        self.times[rows] += 1
        self._now += 0.001 * rows + 0.02 * (self._random.random() < self._held_up)
        return torch.zeros(1)

    def right(self) -> bool:
        """Measures, and returns True if that gives the times that it takes when nothing holds it up."""
        line = measure_rows(self.compute, 64, None)
        return all(line(rows) == pytest.approx(0.001 * rows) for rows in line.tokens)


def test_a_busy_machine_rarely_spoils_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(Rounds(monkeypatch, 0.3, seed).right() for seed in range(100)) >= 95
    assert sum(Rounds(monkeypatch, 0.5, seed).right() for seed in range(100)) >= 70


def test_an_idle_machine_is_measured_three_times_and_a_busy_one_as_long_as_that_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for held_up in (0.0, 1.0):
        rounds = Rounds(monkeypatch, held_up)
        assert rounds.right() is not bool(held_up)
        assert set(rounds.times.values()) == {3}
    slow = Rounds(monkeypatch, 0.5)
    measure_rows(lambda rows: slow.compute(100 * rows), 64, None)  # each round takes longer than there is time
    assert set(slow.times.values()) == {3}


def test_without_drafts_there_is_nothing_to_choose() -> None:
    assert FLAT_TO_EIGHT.worth([], [], rows=3, expected=3) == []


@pytest.mark.parametrize(("max_total_tokens", "measured"), [(512, True), (64, True), (16, False)])
def test_costs_are_measured_at_the_warm_up_where_there_is_room(max_total_tokens: int, measured: bool) -> None:
    engine = Engine(EngineConfig(demo_model.PATH, dtype=torch.float32, speculate=3))
    engine.warm_up(max_batch_size=3, max_prefill_tokens=64, max_total_tokens=max_total_tokens)
    assert engine.speculation is not None
    assert (engine.speculation.costs is not None) is measured
    assert engine.batch is None
