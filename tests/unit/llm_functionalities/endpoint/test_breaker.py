"""A breaker around an endpoint that is a flag."""

import threading
import time
from collections.abc import Iterator

import pytest

from llm_functionalities.endpoint.breaker import CircuitBreaker
from llm_functionalities.errors import CircuitOpen, ServerFailed, Unreachable
from tests.timing import until

INTERVAL = 0.1


class Patient:
    """An endpoint that is healthy or not."""

    def __init__(self) -> None:
        self.healthy = True
        self.probes = 0

    def probe(self) -> None:
        self.probes += 1
        if not self.healthy:
            raise Unreachable("still away")


@pytest.fixture
def patient() -> Patient:
    return Patient()


@pytest.fixture
def breaker(patient: Patient) -> Iterator[CircuitBreaker]:
    breaker = CircuitBreaker("it", patient.probe, interval=INTERVAL, tolerance=3)
    yield breaker
    breaker.stop(2)


def test_the_breaker_opens_at_once_when_no_connection_can_be_made_and_says_why(
    breaker: CircuitBreaker, patient: Patient
) -> None:
    patient.healthy = False
    breaker.check()
    breaker.unreachable(Unreachable("refused"))
    assert not breaker.closed
    with pytest.raises(CircuitOpen, match="refused"):
        breaker.check()


def test_the_breaker_tolerates_failures_unless_they_follow_each_other(breaker: CircuitBreaker) -> None:
    for _ in range(5):
        breaker.failed(ServerFailed("500"))
        breaker.failed(ServerFailed("500"))
        breaker.succeeded()
    assert breaker.closed
    for _ in range(3):
        breaker.failed(ServerFailed("500"))
    assert not breaker.closed


def test_ejections_take_longer_each_time(breaker: CircuitBreaker) -> None:
    took = []
    for failures in (3, 1, 1):  # on probation one is enough
        began = time.monotonic()
        for _ in range(failures):
            breaker.failed(ServerFailed("500"))
        assert breaker.on_probation
        until(lambda: not breaker.ejected)
        took.append(time.monotonic() - began)
        until(lambda: breaker.closed)
    assert took[0] >= INTERVAL
    assert took[1] >= INTERVAL * 2
    assert took[2] >= INTERVAL * 4
    breaker.succeeded()
    assert not breaker.on_probation
    breaker.failed(ServerFailed("500"))
    assert breaker.closed
    assert not breaker.ejected


def test_requests_that_were_sent_before_an_ejection_do_not_prolong_it(breaker: CircuitBreaker) -> None:
    for _ in range(20):
        breaker.failed(ServerFailed("500"))
    assert until(lambda: not breaker.ejected) < INTERVAL * 10


def test_an_endpoint_that_is_always_late_is_ejected_and_refuses_nothing(breaker: CircuitBreaker) -> None:
    breaker.suspect()
    breaker.suspect()
    assert not breaker.ejected
    breaker.suspect()
    assert breaker.ejected
    breaker.check()


def test_the_breaker_closes_by_itself_once_the_endpoint_is_back(breaker: CircuitBreaker, patient: Patient) -> None:
    patient.healthy = False
    breaker.unreachable(Unreachable("refused"))
    time.sleep(INTERVAL * 2.5)
    assert not breaker.closed
    patient.healthy = True
    until(lambda: breaker.closed)
    breaker.check()


def test_the_breaker_leaves_the_endpoint_alone_for_an_interval(patient: Patient) -> None:
    breaker = CircuitBreaker("it", patient.probe, interval=30)
    breaker.unreachable(Unreachable("refused"))
    time.sleep(INTERVAL)
    assert patient.probes == 0
    assert not breaker.closed
    breaker.stop(2)


def test_a_suspicion_is_looked_into_before_anything_is_refused(breaker: CircuitBreaker, patient: Patient) -> None:
    breaker.suspect()
    until(lambda: patient.probes == 1)
    time.sleep(INTERVAL)
    assert breaker.closed
    patient.healthy = False
    time.sleep(INTERVAL)
    breaker.suspect()
    until(lambda: not breaker.closed)
    patient.healthy = True
    until(lambda: breaker.closed)


def test_many_suspicions_make_few_probes(breaker: CircuitBreaker, patient: Patient) -> None:
    ends = time.monotonic() + INTERVAL * 3
    while time.monotonic() < ends:
        breaker.suspect()
    assert patient.probes <= 4


def test_an_endpoint_is_not_probed_for_ever(patient: Patient) -> None:
    breaker = CircuitBreaker("it", patient.probe, interval=INTERVAL, patience=0.5)
    patient.healthy = False
    breaker.unreachable(Unreachable("refused"))
    until(lambda: breaker.closed)
    probes = patient.probes
    time.sleep(INTERVAL * 3)
    assert patient.probes == probes
    assert not [thread for thread in threading.enumerate() if thread.name == "watch it"]


def test_the_breaker_stays_closed_while_nothing_can_watch_the_endpoint(
    breaker: CircuitBreaker, patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        breaker.suspect()
        breaker.unreachable(Unreachable("refused"))
    assert breaker.closed
    patient.healthy = False
    breaker.unreachable(Unreachable("refused"))
    assert not breaker.closed
    patient.healthy = True
    until(lambda: breaker.closed)


def test_stopping_ends_the_watch(patient: Patient) -> None:
    patient.healthy = False
    breaker = CircuitBreaker("it", patient.probe, interval=INTERVAL)
    breaker.unreachable(Unreachable("refused"))
    breaker.stop(2)
    assert not [thread for thread in threading.enumerate() if thread.name == "watch it"]
    breaker.suspect()
    breaker.unreachable(Unreachable("refused"))
    assert not [thread for thread in threading.enumerate() if thread.name == "watch it"]
