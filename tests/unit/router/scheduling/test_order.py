"""Who goes first: classes, deadlines within a class, and the shares of tenants."""

from math import inf
from typing import Any

import pytest

from tests.fakes.recording_sink import RecordingSink
from tests.fakes.simulation import Simulation
from tgi_server.router.scheduling.pace import PromptPace
from tgi_server.router.scheduling.planner import FilterPlan, StepPlan


def ended_in_order(simulation: Simulation, *sinks: RecordingSink) -> list[int]:
    """Runs all, and returns the indices of the sinks in the order in which their first tokens came."""
    order: list[int] = []
    while simulation.turn():
        order += [index for index, sink in enumerate(sinks) if sink.tokens and index not in order]
    assert all(sink.ended for sink in sinks)
    simulation.check_tokens()
    return order


def test_a_lower_number_goes_first() -> None:
    simulation = Simulation(max_batch_size=1)
    sinks = [simulation.submit([1, 2, each], 4, priority=priority) for each, priority in ((1, 2), (2, 0), (1, 1))]
    assert ended_in_order(simulation, *sinks) == [1, 2, 0]


def test_within_a_class_the_earliest_deadline_goes_first() -> None:
    simulation = Simulation(max_batch_size=1)
    sinks = [simulation.submit([1, 2, 1], 2, deadline=each) for each in (inf, 9.5, 2000.0, 8.5)]
    assert ended_in_order(simulation, *sinks) == [3, 1, 0, 2]


def test_a_request_without_a_deadline_is_overtaken_for_some_seconds_only() -> None:
    simulation = Simulation(max_batch_size=1)
    patient = simulation.submit([2, 1], 2)
    urgent: list[RecordingSink] = []
    while not patient.tokens:  # a step takes a second, and so does each request
        assert len(urgent) < 40
        urgent.append(simulation.submit([1, 2], 1, deadline=simulation.seconds + 3))
        simulation.turn()
    assert 8 <= simulation.seconds <= 20


@pytest.mark.parametrize(
    ("limits", "prompt"),
    [({"max_batch_size": 2}, [1, 2, 1]), ({"num_blocks": 8}, [1, 2] * 8)],
    ids=["places", "memory"],
)
def test_a_higher_class_preempts_running_requests_invisibly(limits: dict[str, Any], prompt: list[int]) -> None:
    simulation = Simulation(**limits)
    low = [simulation.submit([1, 1, 2, each], 14, priority=1) for each in (1, 2)]
    for _ in range(6):
        simulation.turn()
    assert all(sink.tokens for sink in low)
    before = len(simulation.sent)
    high = simulation.submit(prompt, 3)
    while not high.tokens:
        assert simulation.turn()
    assert len(simulation.sent) - before <= 5
    assert any(isinstance(plan, FilterPlan) and plan.preempted for plan in simulation.sent[before:])
    simulation.run()
    simulation.check_tokens()
    assert all(sink.starts == 1 and len(sink.tokens) == 14 for sink in low)


def test_a_higher_class_joins_at_once_where_there_is_room() -> None:
    simulation = Simulation(max_batch_size=4, max_waiting_tokens=1000, waiting_served_ratio=10)
    for each in (1, 2, 1):
        simulation.submit([1, 1, each], 16, priority=1)
    for _ in range(4):
        simulation.turn()
    same = simulation.submit([2, 2, 1], 2, priority=1)
    for _ in range(4):
        simulation.turn()
    assert not same.tokens
    high = simulation.submit([2, 1, 1], 2)
    for _ in range(4):
        simulation.turn()
    assert high.tokens


def test_the_prompt_of_a_higher_class_is_computed_before_one_that_has_begun() -> None:
    simulation = Simulation(num_blocks=64, max_batch_prefill_tokens=8)
    long = simulation.submit([1, 2] * 60, 2, priority=1)
    simulation.turn()
    high = simulation.submit([2, 1] * 4, 2)
    assert ended_in_order(simulation, long, high) == [1, 0]
    prefills = simulation.prefills()
    assert [chunk.request_id for chunk in prefills[2].chunks][:1] == [2]


def share(simulation: Simulation, counts: dict[str, int], turns: int, **options: Any) -> dict[str, int]:
    """Returns the tokens that each tenant gets while all have requests waiting."""
    sinks = {tenant: [] for tenant in counts}  # type: dict[str, list[RecordingSink]]
    for tenant, count in counts.items():
        weight = options.get(tenant, 1.0)
        sinks[tenant] += [simulation.submit([1, 2], 6, tenant=tenant, weight=weight) for _ in range(count)]
    for _ in range(turns):
        simulation.turn()
    got = {tenant: sum(len(sink.tokens) for sink in each) for tenant, each in sinks.items()}
    simulation.run()
    simulation.check_tokens()
    return got


def test_tenants_get_equal_shares_however_many_requests_they_send() -> None:
    got = share(Simulation(64, max_batch_size=4, fair=True), {"many": 60, "few": 20}, 40)
    assert 0.75 <= got["many"] / got["few"] <= 1.34
    got = share(Simulation(64, max_batch_size=4), {"many": 60, "few": 20}, 40)
    assert got["few"] == 0


def test_a_weight_is_a_multiple_of_a_share() -> None:
    got = share(Simulation(64, max_batch_size=8, fair=True), {"gold": 60, "plain": 60}, 40, gold=3.0)
    assert 2.2 <= got["gold"] / got["plain"] <= 4


def test_a_tenant_that_comes_does_not_wait_for_the_requests_of_another() -> None:
    simulation = Simulation(64, max_batch_size=4, fair=True)
    crowd = [simulation.submit([1, 2], 40, tenant="crowd") for _ in range(30)]
    for _ in range(8):
        simulation.turn()
    before = simulation.seconds
    single = simulation.submit([2, 2], 4, tenant="single")
    while not single.tokens:
        assert simulation.turn()
    assert simulation.seconds - before <= 4  # steps
    simulation.run()
    simulation.check_tokens()
    assert all(len(sink.tokens) == 40 for sink in crowd)


def test_a_tenant_that_pauses_saves_nothing_up() -> None:
    simulation = Simulation(64, max_batch_size=2, fair=True)
    simulation.submit([1, 2], 2, tenant="rare")
    busy = [simulation.submit([1, 2], 8, tenant="busy") for _ in range(20)]
    for _ in range(30):
        simulation.turn()
    had = sum(len(sink.tokens) for sink in busy)
    rare = [simulation.submit([1, 2], 8, tenant="rare") for _ in range(20)]
    for _ in range(40):
        simulation.turn()
    gained = sum(len(sink.tokens) for sink in busy) - had
    assert 0.6 <= gained / sum(len(sink.tokens) for sink in rare) <= 1.7


def slow_cpu(replies: int, prompt_tokens: int) -> float:
    """Returns the seconds of a step."""
    return 0.1 + 0.002 * replies + 0.006 * prompt_tokens


def _beside_a_long_prompt(**options: Any) -> tuple[Simulation, RecordingSink]:
    """Returns a machine on which the beginning of a prompt of 9,000 tokens has been computed."""
    simulation = Simulation(
        num_blocks=4000,
        block_size=16,
        pace=PromptPace(4096, 16),
        step_seconds=slow_cpu,
        max_batch_prefill_tokens=4096,
        **options,
    )
    warm = simulation.submit([1, 2, 3], max_new_tokens=20)
    simulation.run()
    assert warm.ended
    long = simulation.submit([4 + position % 19 for position in range(9000)], max_new_tokens=2)
    for _ in range(10):
        simulation.turn()
    return simulation, long


def _seconds_until(simulation: Simulation, sink: RecordingSink) -> float:
    began = simulation.seconds
    while not sink.tokens:
        assert simulation.turn()
    return simulation.seconds - began


@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("tokens", [1, 30, 100])
def test_a_short_prompt_passes_a_long_one(tokens: int, fair: bool) -> None:
    simulation, long = _beside_a_long_prompt(fair=fair)
    for again in range(3):
        short = simulation.submit([1, 2, again] * tokens, max_new_tokens=5)
        assert _seconds_until(simulation, short) < 2 + slow_cpu(2, 3 * tokens)
    assert not long.tokens
    simulation.run()
    simulation.check_tokens()


def test_a_prompt_that_is_mostly_cached_counts_as_a_short_one() -> None:
    simulation, long = _beside_a_long_prompt()
    earlier = simulation.submit([3, 2, 1] * 1000, max_new_tokens=5)
    simulation.run()
    another = simulation.submit([5] * 2000, max_new_tokens=2)
    for _ in range(4):
        simulation.turn()
    later = simulation.submit([3, 2, 1] * 1010, max_new_tokens=5)
    assert _seconds_until(simulation, later) < 3
    assert not another.tokens
    simulation.run()
    simulation.check_tokens()
    assert earlier.ended
    assert long.ended


def test_short_prompts_that_never_end_leave_a_long_one_half_of_the_computing() -> None:
    simulation, long = _beside_a_long_prompt()
    began, others = simulation.seconds, 0
    while not long.tokens:
        if len(simulation.waiting) + len(simulation.batch) < 4:
            others += 1
            simulation.submit([1, 2, 3 + others % 20] * 40, max_new_tokens=1)
        assert simulation.turn()
    alone = slow_cpu(0, 9000) - 0.1 + 9000 / 128 * 0.1
    assert others > 20
    assert simulation.seconds - began < 2.2 * alone


def test_of_two_long_prompts_the_one_that_came_first_is_not_delayed_by_a_longer_one() -> None:
    simulation, _ = _beside_a_long_prompt()
    simulation.submit([2] * 9000, max_new_tokens=2)
    simulation.run()
    computed = [chunk.request_id for message in simulation.prefills() for chunk in message.chunks]
    assert computed == sorted(computed)
    simulation.check_tokens()


def test_a_prompt_that_is_just_about_in_time_is_not_passed() -> None:
    simulation, _ = _beside_a_long_prompt()
    simulation.cancel(2)
    simulation.run()
    tight = simulation.submit([2] * 3000, max_new_tokens=1, deadline=simulation.seconds + 22)
    for _ in range(4):
        simulation.turn()
    short = simulation.submit([1, 2, 1] * 100, max_new_tokens=1)
    while not tight.tokens:
        assert simulation.turn()
        assert not short.tokens
    simulation.run()


def test_a_long_step_is_answered_before_the_next_is_sent() -> None:
    """So whoever comes, or leaves, waits for one of them."""
    simulation, _ = _beside_a_long_prompt()
    while simulation.send():
        pass
    assert not simulation.send()
    short = simulation.submit([1, 2, 1], max_new_tokens=1)
    assert not simulation.send()
    simulation.receive()
    (plan,) = simulation.send()
    assert isinstance(plan, StepPlan)
    assert plan.chunks[0] == (3, 1)
    simulation.cancel(2)
    simulation.run()
    assert short.ended
