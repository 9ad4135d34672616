from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tgi_server.router.scheduling.admission import AdmissionPolicy, Reason
from tgi_server.router.scheduling.settings import SchedulerSettings

POLICY = AdmissionPolicy(
    max_batch_size=10,
    max_batch_prefill_tokens=4096,
    max_batch_total_tokens=1000,
    prefill_chunk_tokens=512,
    max_waiting_tokens=20,
    waiting_served_ratio=0.5,
)


@pytest.mark.parametrize(
    ("running", "waiting", "steps", "reason"),
    [
        (0, 0, 100, None),
        (0, 1, 0, Reason.ROOM),
        (5, 1, 0, Reason.ROOM),
        (6, 1, 0, None),
        (6, 3, 0, None),
        (6, 4, 0, Reason.BACKPRESSURE),
        (6, 1, 19, None),
        (6, 1, 20, Reason.WAIT_EXCEEDED),
        (9, 1, 20, Reason.WAIT_EXCEEDED),
        (10, 100, 1000, None),
    ],
)
def test_when_waiting_requests_are_taken_in(running: int, waiting: int, steps: int, reason: Reason | None) -> None:
    assert POLICY.reason_to_admit(running, waiting, steps) is reason


def test_streams_bound_what_a_step_computes_of_prompts() -> None:
    assert POLICY.prefill_budget(decoding=False) == 4096
    assert POLICY.prefill_budget(decoding=True) == 512


def test_a_newcomer_leaves_the_others_room_to_grow() -> None:
    assert POLICY.total_budget(held_tokens=700, growth_tokens=100) == 200


def test_the_policy_takes_its_limits_from_the_settings() -> None:
    policy = AdmissionPolicy.of(
        SchedulerSettings(7, 8, max_batch_size=6, max_waiting_tokens=5, waiting_served_ratio=0.4)
    )
    assert (policy.max_batch_prefill_tokens, policy.max_batch_total_tokens) == (7, 8)


class Clock:
    """Steps of a batch whose requests all take `length` steps. One request comes at each of the steps in `arrivals`."""

    def __init__(self, policy: AdmissionPolicy, arrivals: Iterable[int], length: int) -> None:
        self.policy = policy
        self.arrivals = sorted(arrivals)
        self.length = length
        self.waits: list[int] = []
        self.sizes: list[int] = []

    def run(self) -> None:
        waiting: list[int] = []
        running: list[int] = []
        step = since_prefill = 0
        arrivals = list(self.arrivals)
        while arrivals or waiting or running:
            while arrivals and arrivals[0] <= step:
                waiting.append(arrivals.pop(0))
            reason = self.policy.reason_to_admit(len(running), len(waiting), since_prefill)
            joining = waiting[: self.policy.max_batch_size - len(running)] if reason else []
            del waiting[: len(joining)]
            self.waits += [step - arrival for arrival in joining]
            running = [left - 1 for left in running if left > 1] + [self.length] * len(joining)
            self.sizes.append(len(running))
            since_prefill = 0 if joining else since_prefill + 1
            step += 1


def test_a_lone_request_waits_no_longer_than_max_waiting_tokens() -> None:
    clock = Clock(POLICY, [0] * 6 + [1], length=1000)
    clock.run()
    assert clock.waits[:6] == [0] * 6
    assert clock.waits[6] == POLICY.max_waiting_tokens


def test_a_crowd_is_taken_in_at_once() -> None:
    clock = Clock(POLICY, [0] * 6 + [1] * 4, length=1000)
    clock.run()
    assert clock.waits == [0] * 10


@given(
    arrivals=st.lists(st.integers(0, 60), max_size=40),
    length=st.integers(1, 30),
    max_batch_size=st.integers(1, 12),
    max_waiting_tokens=st.integers(0, 10),
    ratio=st.floats(0, 3),
)
def test_nobody_starves_and_no_batch_is_too_large(
    arrivals: list[int], length: int, max_batch_size: int, max_waiting_tokens: int, ratio: float
) -> None:
    clock = Clock(AdmissionPolicy(max_batch_size, 1, 1, 1, max_waiting_tokens, ratio), arrivals, length)
    clock.run()
    assert len(clock.waits) == len(arrivals)
    assert max(clock.sizes, default=0) <= max_batch_size
    # Each wave of at most `max_batch_size` requests before it costs a wait and a generation.
    waves = len(arrivals) // max_batch_size + 1
    assert max(clock.waits, default=0) <= waves * (max_waiting_tokens + length + 1)
