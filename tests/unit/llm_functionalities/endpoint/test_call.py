"""Deadlines, and calls that are ended from another thread."""

import socket
import threading

import pytest

from llm_functionalities.endpoint.call import Call, Deadline, current_call, working_on
from llm_functionalities.errors import BadResponse, Cancelled, DeadlineExceeded


@pytest.mark.parametrize(
    ("timeout_ms", "caller_seconds", "expected"),
    [
        (0, None, 10.0),
        (-5, None, 10.0),
        (1500, None, 1.5),
        (60_000, None, 60.0),  # the default is for those who set none
        (0, 2.0, 1.95),
        (1500, 30.0, 1.5),
        (30_000, 2.0, 1.95),
        (0, 0.1, 0.08),  # a short deadline keeps most of its time
        (0, 0.0, 0.0),
        (100_001, None, 100.0),  # nobody gets more than the longest time
        (2**31 - 1, 1e7, 100.0),
    ],
)
def test_the_sooner_of_what_is_set(timeout_ms: int, caller_seconds: float | None, expected: float) -> None:
    deadline = Deadline.of_request(timeout_ms, caller_seconds, default_seconds=10.0, longest_seconds=100.0)
    assert deadline.remaining() == pytest.approx(expected, abs=0.01)


def test_within_is_never_later() -> None:
    deadline = Deadline.after(1.0)
    assert deadline.within(5.0).at == deadline.at
    assert deadline.within(0.2).remaining() == pytest.approx(0.2, abs=0.01)


def test_a_call_that_has_ended_says_why() -> None:
    late, cancelled, both = (Call(Deadline.after(seconds)) for seconds in (0, 5, 5))
    with pytest.raises(DeadlineExceeded):
        late.remaining()
    assert 4 < cancelled.remaining() <= 5
    cancelled.cancel()
    with pytest.raises(Cancelled):
        cancelled.remaining()
    both.expire()
    both.cancel()  # the first end counts
    with pytest.raises(DeadlineExceeded):
        both.pause(1)


def test_a_request_is_sent_once_unless_it_was_refused() -> None:
    call = Call(Deadline.after(5))
    call.check_unsent()
    call.sent = True
    with pytest.raises(BadResponse, match="sent again"):
        call.check_unsent()
    call.allow_another()
    call.check_unsent()


def test_cancelling_ends_the_read_of_the_worker() -> None:
    ours, theirs = socket.socketpair()
    call = Call(Deadline.after(30))
    with ours, theirs, working_on(call):
        assert current_call() is call
        assert call.hold(ours) > 29
        threading.Timer(0.05, call.cancel).start()
        assert ours.recv(1) == b""
    with pytest.raises(LookupError):
        current_call()


def test_a_connection_that_was_released_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    call = Call(Deadline.after(30))
    with ours, theirs:
        call.hold(ours)
        call.release()
        call.cancel()
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
