"""Who goes first: classes, deadlines within a class, and the shares of tenants."""

from math import inf
from typing import Any

import pytest

from tests.fakes.recording_sink import RecordingSink
from tests.fakes.simulation import Simulation
from tgi_server.router.scheduling.planner import FilterPlan


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
