"""A request ends at its deadline, and is refused when it comes if it cannot be in time.

Times are those of a made-up machine.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from tests.fakes.recording_sink import RecordingSink
from tests.fakes.simulation import Simulation
from tests.timing import eventually
from tgi_server.contract import FinishReason, Grammar, GrammarKind
from tgi_server.router.errors import CannotBeInTime, RequestTimedOut
from tgi_server.router.scheduling.deadlines import DeadlineAlarm
from tgi_server.router.scheduling.pace import PromptPace

TOKENS, PLACES, SECONDS = 20, 8, 2.0
PROMPT = 75


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


def machine(replies: int, prompt_tokens: int) -> float:
    return 0.02 + 0.001 * replies + 0.0005 * prompt_tokens


def busy_server(*, admission: bool = True, **options: Any) -> Simulation:
    """A server that has been measured: it answers about 10 requests a second."""
    simulation = Simulation(
        **{"num_blocks": 256, "step_seconds": machine, "max_batch_size": PLACES, "admission": admission} | options
    )
    for _ in range(3):
        for number in range(2 * PLACES):
            simulation.submit([1 + number % 2] * 12, TOKENS)
        simulation.run()
    return simulation


@dataclass(slots=True)
class Load:
    """What became of requests, by number; the longest that one ended after its deadline, in seconds.

    waited: those of the refused that were accepted first.
    """

    in_time: int = 0
    refused: int = 0
    waited: int = 0
    late: int = 0
    longest_late: float = 0.0


def new_prompt(index: int, tokens: int) -> list[int]:
    """Returns a prompt that no other begins with."""
    return [1 + bit for bit in map(int, f"{index:012b}")] + [1] * (tokens - 12)


def open_loop(simulation: Simulation, rate: float, number: int, prompt_tokens: int = 12) -> Load:
    """Sends `rate` requests a second, whatever becomes of them."""
    began = simulation.seconds
    arrivals = [began + index / rate for index in range(number)]
    open_: dict[int, tuple[RecordingSink, float]] = {}
    load, index = Load(), 0
    while index < number or open_:
        while index < number and arrivals[index] <= simulation.seconds:
            deadline = arrivals[index] + SECONDS
            sink = simulation.submit(new_prompt(index, prompt_tokens), TOKENS, deadline=deadline)
            load.waited += not sink.ended
            open_[index] = sink, deadline
            index += 1
        if not simulation.turn() and index < number:
            simulation.seconds = max(simulation.seconds, arrivals[index])
        for each, (sink, deadline) in list(open_.items()):
            if sink.ended:
                del open_[each]
                after = simulation.seconds - deadline
                load.refused += isinstance(sink.error, CannotBeInTime)
                load.late += isinstance(sink.error, RequestTimedOut) or after > 0
                load.in_time += sink.reason is not None and after <= 0
                load.waited -= not isinstance(sink.error, CannotBeInTime)
                load.longest_late = max(load.longest_late, after)
    return load


def capacity(simulation: Simulation, prompt_tokens: int = 12) -> float:
    """Returns how many requests a second are answered while many wait."""
    began, number = simulation.seconds, 20 * PLACES
    for index in range(number):
        simulation.submit(new_prompt(index, prompt_tokens), TOKENS)
    simulation.run()
    return number / (simulation.seconds - began)


Machine = Callable[[int, int], float]


def with_prompts(replies: int, prompt_tokens: int) -> float:
    """A machine that computes prompts for half of its time."""
    return 0.012 + 0.0005 * replies + 0.0004 * prompt_tokens


def uneven(seed: int) -> Machine:
    random = Random(seed)
    return lambda replies, prompt_tokens: with_prompts(replies, prompt_tokens) * random.uniform(0.7, 1.3)


def with_stalls(seed: int) -> Machine:
    """A machine that stands still in one step of fifty."""
    random = Random(seed)
    return lambda replies, prompt_tokens: with_prompts(replies, prompt_tokens) * (5 if random.random() < 0.02 else 1)


def with_slow_seconds(seed: int) -> Machine:
    """A machine that is a fifth slower for three of ten seconds."""
    now = float(seed)

    def step(replies: int, prompt_tokens: int) -> float:
        nonlocal now
        seconds = with_prompts(replies, prompt_tokens) * (1.2 if now % 10 < 3 else 1.0)
        now += seconds
        return seconds

    return step


def with_late_router(seed: int) -> Machine:
    """A machine whose router is busy now and then, and finds the responses to two steps at once."""
    random, borrowed = Random(seed), 0.0

    def step(replies: int, prompt_tokens: int) -> float:
        nonlocal borrowed
        seconds = with_prompts(replies, prompt_tokens)
        if borrowed:
            seconds, borrowed = max(0.0005, seconds - borrowed), 0.0
        elif random.random() < 0.5:
            borrowed = with_prompts(replies, 0)
            seconds += borrowed
        return seconds

    return step


def server_with_pace(step_seconds: Machine) -> Simulation:
    pace = PromptPace(1024, 16)
    return busy_server(step_seconds=step_seconds, block_size=16, pace=pace, max_batch_prefill_tokens=1024)


@pytest.mark.parametrize(
    ("machine", "seed"),
    [
        (with_late_router, 1),
        *(
            pytest.param(machine, seed, marks=pytest.mark.slow)
            for machine in (uneven, with_stalls, with_slow_seconds, with_late_router)
            for seed in (2, 3)
        ),
    ],
)
def test_on_a_machine_whose_steps_vary_few_are_late_or_wait_in_vain(
    machine: Callable[[int], Machine], seed: int
) -> None:
    rate, seconds = capacity(server_with_pace(with_prompts), PROMPT), 8
    load = open_loop(server_with_pace(machine(seed)), 3 * rate, int(3 * rate * seconds), PROMPT)
    assert load.in_time >= 0.85 * rate * seconds
    assert load.late <= 0.15 * rate * seconds
    assert load.waited <= 0.02 * load.refused


def test_who_is_accepted_in_an_overload_is_in_time() -> None:
    rate, seconds = capacity(server_with_pace(with_prompts), PROMPT), 6
    load = open_loop(server_with_pace(with_prompts), 3 * rate, int(3 * rate * seconds), PROMPT)
    assert load.in_time >= 0.95 * rate * seconds
    assert (load.late, load.waited) == (0, 0)


def test_a_machine_that_was_slow_for_a_while_serves_again() -> None:
    slowness = 20.0
    simulation = busy_server(step_seconds=lambda replies, tokens: slowness * machine(replies, tokens))
    slowness = 1.0
    assert refusal(simulation, TOKENS, SECONDS) != ""
    simulation.seconds += 15
    sinks = []
    for _ in range(20):
        sinks.append(simulation.submit([1, 2], TOKENS, deadline=simulation.seconds + SECONDS))
        simulation.run()
        simulation.seconds += 1
    assert sinks[0].reason is not None
    assert all(sink.reason is not None for sink in sinks[-5:])


@pytest.mark.slow
def test_what_can_be_in_time_is_at_three_times_the_capacity() -> None:
    rate = capacity(busy_server())
    seconds = 6
    load = open_loop(busy_server(), 3 * rate, int(3 * rate * seconds))
    assert load.in_time >= 0.9 * rate * seconds
    assert load.refused >= 1.2 * rate * seconds
    assert load.longest_late <= machine(PLACES, 16)


@pytest.mark.parametrize("share", [pytest.param(0.5, marks=pytest.mark.slow), 0.9])
def test_nobody_is_refused_below_the_capacity(share: float) -> None:
    rate = share * capacity(busy_server())
    load = open_loop(busy_server(), rate, int(3 * rate))
    assert (load.refused, load.late) == (0, 0)


def refusal(simulation: Simulation, tokens: int, deadline: float, prompt: Sequence[int] = (1, 2)) -> str:
    """Returns why a request is refused that comes now; nothing if it is not."""
    sink = simulation.submit(list(prompt), tokens, deadline=simulation.seconds + deadline)
    return str(sink.error) if isinstance(sink.error, CannotBeInTime) else ""


def test_a_request_that_takes_too_long_by_itself_is_refused_at_once() -> None:
    simulation = busy_server()
    assert "after its deadline" in refusal(simulation, 400, 2.0)
    assert refusal(simulation, 20, 2.0) == ""
    simulation.run()


@pytest.mark.parametrize("admission", [True, False])
def test_a_request_whose_preparation_took_all_its_time_is_timed_out(admission: bool) -> None:
    simulation = busy_server(admission=admission)
    sink = simulation.submit([1, 2], TOKENS, deadline=simulation.seconds - 0.1)
    assert isinstance(sink.error, RequestTimedOut)
    assert "before it could be queued" in str(sink.error)
    assert not simulation.turn()


def test_no_request_is_refused_before_anything_is_measured_nor_without_admission() -> None:
    assert refusal(Simulation(64, step_seconds=machine), 200, 0.01) == ""
    assert refusal(busy_server(admission=False), 400, 2.0) == ""


def test_answers_that_usually_end_early_are_expected_to_do_so() -> None:
    simulation = Simulation(num_blocks=256, step_seconds=machine, max_batch_size=PLACES)
    for _ in range(40):
        simulation.submit([1, 2, 1, 2], 400, stop_after=8)
    simulation.run()
    assert refusal(simulation, 400, 2.0) == ""
    simulation.run()


def test_the_queue_counts() -> None:
    simulation = busy_server()
    for _ in range(40):
        simulation.submit([1, 2], TOKENS, priority=-1)
    assert "try again later" in refusal(simulation, TOKENS, 1.5)
    simulation.run()


def test_a_request_of_a_higher_class_is_not_refused_for_those_that_give_way_to_it() -> None:
    simulation = busy_server()
    for _ in range(40):
        simulation.submit([1, 2], TOKENS, priority=1)
    for _ in range(6):
        simulation.turn()
    sink = simulation.submit([2, 2], TOKENS, deadline=simulation.seconds + 1.5)
    simulation.run()
    assert sink.reason is not None


def test_a_request_that_would_be_late_joins_before_others_would_have_it_join() -> None:
    simulation = busy_server(max_waiting_tokens=1000, waiting_served_ratio=10.0)
    for _ in range(6):
        simulation.submit([1, 2], 200)
    for _ in range(3):
        simulation.turn()
    sink = simulation.submit([2, 1], TOKENS, deadline=simulation.seconds + 2)
    simulation.run()
    assert sink.reason is not None
