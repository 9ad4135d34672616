"""Steps and pieces of other work take turns."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.timing import SECONDS
from tgi_server.shard import turns
from tgi_server.shard.turns import Turns


@contextmanager
def computing_steps(made: Turns, order: list[str]) -> Iterator[None]:
    """Computes steps, each as soon as the last is done, while the context is open."""
    ended = threading.Event()

    def compute() -> None:
        while not ended.is_set():
            with made.step():
                order.append("step")

    thread = threading.Thread(target=compute)
    thread.start()
    yield
    ended.set()
    thread.join(SECONDS)


def test_a_piece_comes_between_two_steps_however_fast_these_follow() -> None:
    made, order = Turns(), list[str]()
    with computing_steps(made, order), made.pieces():
        for _ in range(50):
            order.append("piece")
            while not made.steps_wait:
                threading.Event().wait(0.001)
            made.pause()
    first = order.index("piece")
    last = len(order) - order[::-1].index("piece")
    assert order[first:last].count("piece") == 50
    assert "piecepiece" not in "".join(order[first:last])
    assert "stepstep" not in "".join(order[first:last])


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(turns, "time", made)
    return made


def step(made: Turns, clock: Clock, seconds: float) -> None:
    with made.step():
        clock.now += seconds


def test_a_piece_and_a_step_fill_the_gap_between_two_tokens(clock: Clock) -> None:
    made = Turns()
    for _ in range(15):
        step(made, clock, 0.03)
    assert made.piece_seconds(None) == pytest.approx(0.9 * 2 * 0.03 - 0.03)
    assert made.piece_seconds(0.1) == pytest.approx(0.9 * 0.1 - 0.03)
    step(made, clock, 0.05)  # it had tokens of a prompt
    assert made.piece_seconds(0.1) == pytest.approx(0.9 * 0.1 - 0.05)
    step(made, clock, 0.5)
    assert made.piece_seconds(0.1) == made.piece_seconds(None) == pytest.approx(0.1 * 0.03)


def test_a_run_of_longer_steps_does_not_make_pieces_longer(clock: Clock) -> None:
    made = Turns()
    for seconds in (0.03,) * 40 + (0.08,) * 12 + (0.03,):  # 12 steps with pieces of a prompt, or beside another program
        step(made, clock, seconds)
    assert made.piece_seconds(None) == pytest.approx(0.9 * 2 * 0.03 - 0.03)


def test_pieces_are_longer_while_there_are_no_steps(clock: Clock) -> None:
    made = Turns()
    assert made.piece_seconds(None) == 0.05
    step(made, clock, 0.001)
    assert made.piece_seconds(None) < 0.001
    clock.now += 1.0
    assert made.piece_seconds(None) == 0.05
    assert made.piece_seconds(0.02) == 0.01
