import asyncio

import pytest

from tests.fakes.simulation import Simulation
from tests.timing import eventually
from tgi_server.contract import FinishReason, Grammar, GrammarKind
from tgi_server.router.errors import RequestTimedOut
from tgi_server.router.scheduling.deadlines import DeadlineAlarm


def test_a_request_that_runs_ends_at_its_deadline_and_frees_its_blocks() -> None:
    simulation = Simulation()
    late = simulation.submit([1, 2, 1], 40, deadline=5.5)
    other = simulation.submit([2, 2, 1], 20)
    simulation.run()
    assert isinstance(late.error, RequestTimedOut)
    assert 3 <= len(late.tokens) <= 6  # a step takes a second
    assert len(other.tokens) == 20
    assert simulation.memory.held_tokens == 0
    assert not simulation.shard.rows
    simulation.check_tokens()


def test_a_request_that_waits_ends_at_its_deadline() -> None:
    simulation = Simulation(max_batch_size=1, admission=False)
    running = simulation.submit([1, 2, 1], 20)
    simulation.turn()
    late = simulation.submit([2, 2, 1], 20, deadline=5.5)
    simulation.run()
    assert isinstance(late.error, RequestTimedOut)
    assert (late.starts, late.tokens) == (0, [])
    assert len(running.tokens) == 20


def test_the_first_token_may_have_a_deadline_of_its_own() -> None:
    simulation = Simulation(max_batch_size=1)
    flows = simulation.submit([1, 2, 1], 20, first_token_by=3.5)
    simulation.turn()
    silent = simulation.submit([2, 2, 1], 20, first_token_by=3.5)
    simulation.run()
    assert len(flows.tokens) == 20
    assert isinstance(silent.error, RequestTimedOut)


def test_a_request_that_comes_too_late_never_waits() -> None:
    simulation = Simulation()
    sink = simulation.submit([1, 2, 1], deadline=0.0)
    simulation.run()
    assert isinstance(sink.error, RequestTimedOut)
    assert sink.starts == 0


async def test_the_alarm_rings_at_the_soonest_deadline() -> None:
    loop = asyncio.get_running_loop()
    rung: list[float] = []

    def expire() -> None:
        if alarm.is_due(now := loop.time()):
            rung.append(now)
            alarm.reset([])

    alarm = DeadlineAlarm(expire, loop.time)
    soonest = loop.time() + 0.02
    alarm.add(soonest + 100)
    alarm.start(loop)
    alarm.add(soonest)
    await eventually(lambda: bool(rung))
    assert rung[0] >= soonest
    alarm.stop()


def test_a_partial_text_ends_shortly_before_its_deadline() -> None:
    simulation = Simulation(num_blocks=64, step_seconds=lambda replies, prompt_tokens: 0.01)
    partial = simulation.submit([1, 2, 1], 200, deadline=0.5, on_timeout="partial")
    simulation.run()
    assert partial.reason is FinishReason.DEADLINE
    assert 40 <= len(partial.tokens) <= 48
    assert simulation.memory.held_tokens == 0


def test_a_partial_text_without_a_token_is_none() -> None:
    simulation = Simulation(max_batch_size=1, admission=False)
    simulation.submit([1, 2, 1], 20)
    simulation.turn()
    waiting = simulation.submit([2, 2, 1], 20, deadline=5.5, on_timeout="partial")
    simulation.run()
    assert isinstance(waiting.error, RequestTimedOut)


@pytest.mark.parametrize(("action", "closing"), [("complete", [1]), ("partial", []), (None, [])])
def test_a_grammar_is_told_once_to_end_its_text(action: str | None, closing: list[int]) -> None:
    simulation = Simulation(num_blocks=64, step_seconds=lambda replies, prompt_tokens: 0.01)
    grammar = Grammar(GrammarKind.REGEX, "a*")
    simulation.submit([1, 2, 1], 200, deadline=0.4, on_timeout=action, grammar=grammar)
    simulation.run()
    steps = simulation.steps()
    assert [each for step in steps for each in step.closing] == closing
    if closing:
        assert next(index for index, step in enumerate(steps) if step.closing) / len(steps) > 0.5
