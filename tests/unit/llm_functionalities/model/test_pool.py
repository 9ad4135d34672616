import threading
from collections.abc import Callable, Iterator

import pytest

from llm_functionalities.errors import NoThread
from llm_functionalities.model.pool import FairPool
from tests.timing import SECONDS, until


@pytest.fixture
def pool() -> Iterator[FairPool]:
    pool = FairPool(threads=4, batch_threads=2)
    yield pool
    pool.stop(5)


class Gate:
    """Jobs that wait until they may go on, and tell their names."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.running: list[str] = []
        self.done: list[str] = []

    def job(self, name: str) -> Callable[[], None]:
        def run() -> None:
            self.running.append(name)
            self.open.wait(SECONDS)
            self.done.append(name)

        return run


def test_threads_are_started_when_needed_and_bounded() -> None:
    before = threading.active_count()
    pool = FairPool(threads=4, batch_threads=2)
    assert threading.active_count() == before
    gate = Gate()
    for number in range(10):
        pool.run(gate.job(str(number)))
    until(lambda: len(gate.running) == 4)
    assert threading.active_count() == before + 4
    assert pool.waiting == 6
    gate.open.set()
    until(lambda: len(gate.done) == 10)
    pool.stop(5)
    assert threading.active_count() == before


def test_an_idle_thread_is_used_before_another_one_starts(pool: FairPool) -> None:
    before = threading.active_count()
    for _ in range(20):
        done = threading.Event()
        pool.run(done.set)
        assert done.wait(SECONDS)
        until(lambda: pool._idle == 1)
    assert threading.active_count() == before + 1


def test_a_burst_after_a_pause_does_not_queue_for_one_thread(pool: FairPool) -> None:
    warm = threading.Event()
    pool.run(warm.set)
    assert warm.wait(SECONDS)
    until(lambda: pool._idle == 1)
    gate = Gate()
    for number in range(4):
        pool.run(gate.job(str(number)))
    until(lambda: len(gate.running) == 4)
    gate.open.set()


def test_a_batch_leaves_threads_to_single_jobs(pool: FairPool) -> None:
    gate = Gate()
    pool.run_batch(1000, lambda number: gate.job(f"batch {number}")())
    until(lambda: len(gate.running) == 2)
    single = threading.Event()
    pool.run(single.set)
    assert single.wait(SECONDS)
    assert len(gate.running) == 2
    gate.open.set()


def test_batches_take_turns() -> None:
    pool = FairPool(threads=1, batch_threads=1)
    order: list[str] = []
    blocker = Gate()
    pool.run(blocker.job("first"))
    until(lambda: blocker.running == ["first"])
    for name in "ab":
        pool.run_batch(3, lambda _, name=name: order.append(name))
    for _ in range(2):
        pool.run(lambda: order.append("single"))
    blocker.open.set()
    until(lambda: len(order) == 8)
    assert order == ["a", "single", "b", "single", "a", "b", "a", "b"]
    pool.stop(5)


def test_a_dropped_batch_ends_what_waits_and_nothing_else(pool: FairPool) -> None:
    gate = Gate()
    drop = pool.run_batch(100, lambda number: gate.job(str(number))())
    until(lambda: len(gate.running) == 2)
    drop()
    assert pool.waiting == 0
    gate.open.set()
    until(lambda: len(gate.done) == 2)
    after = threading.Event()
    pool.run_batch(1, lambda _: after.set())
    assert after.wait(SECONDS)
    assert len(gate.done) == 2


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_jobs_wait_for_living_threads_while_no_more_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threading.active_count()
    pool = FairPool(threads=4, batch_threads=2)
    gate = Gate()
    pool.run(gate.job("first"))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for number in range(5):
            pool.run(gate.job(str(number)))
        pool.run_batch(2, lambda number: gate.job(f"batch {number}")())
    pool.run(gate.job("last"))
    until(lambda: len(gate.running) == 4)
    gate.open.set()
    until(lambda: len(gate.done) == 9)
    pool.stop(5)
    assert threading.active_count() == before


def test_jobs_are_refused_while_there_is_no_thread_at_all(pool: FairPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(5):
            with pytest.raises(NoThread):
                pool.run(lambda: None)
            with pytest.raises(NoThread):
                pool.run_batch(3, lambda _: None)
    assert pool.waiting == 0
    done = threading.Event()
    pool.run(done.set)
    assert done.wait(SECONDS)


@pytest.mark.logs_tracebacks
def test_a_job_that_fails_costs_no_thread(pool: FairPool, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("broken job")

    for _ in range(8):
        pool.run(fail)
    pool.run_batch(8, lambda _: fail())
    done = threading.Event()
    pool.run_batch(1, lambda _: done.set())
    assert done.wait(SECONDS)
    until(lambda: caplog.text.count("ValueError: broken job") == 16)
