"""What steps take is made up here: seconds for the replies that they continue, and for each prompt token."""

from collections.abc import Callable

import pytest

from tests.fakes.simulation import Simulation
from tgi_server.router.scheduling.pace import UNMEASURED_TOKENS, PromptPace

Machine = Callable[[int, int], float]


def _machine(step: float, reply: float, token: float) -> Machine:
    return lambda replies, prompt_tokens: step + reply * replies + token * prompt_tokens


CPU = _machine(0.010, 0.001, 0.0005)
GPU = _machine(0.010, 0.00001, 0.00002)


def _used(pace: PromptPace, machine: Machine, *replies: int, tokens: int = 256) -> PromptPace:
    """Lets steps pass, for each number of replies some without prompts and some with so many prompt tokens."""
    for each in replies:
        for prompt_tokens in (0, 0, 0, tokens, tokens, tokens):
            pace.observe(each, prompt_tokens, machine(each, prompt_tokens))
    return pace


def _default_pace(block_size: int = 16) -> PromptPace:
    return PromptPace(4096, block_size)


def test_before_anything_is_measured_a_fixed_number_rides_along() -> None:
    assert _default_pace().tokens_beside(3, 3) == UNMEASURED_TOKENS
    assert PromptPace(64, 16).tokens_beside(3, 3) == 64


@pytest.mark.parametrize(("machine", "tokens"), [(CPU, 96), (GPU, 1008)])
def test_a_step_with_prompts_takes_three_times_as_long_as_one_without(machine: Machine, tokens: int) -> None:
    pace = _used(_default_pace(), machine, 16)
    assert pace.tokens_beside(16, 16) == tokens
    assert machine(16, tokens) <= 3 * machine(16, 0) < machine(16, tokens + 16)


@pytest.mark.parametrize(("target_ms", "tokens"), [(60, 64), (200, 336), (32, 11), (20, 8), (5, 8), (10_000, 4096)])
def test_a_target_is_kept_as_far_as_a_step_without_prompts_lets_it(target_ms: int, tokens: int) -> None:
    pace = _used(PromptPace(4096, 16, target_ms / 1000), CPU, 16)
    assert pace.tokens_beside(16, 16) == tokens


def test_whole_blocks_ride_along_and_one_at_least() -> None:
    assert _used(_default_pace(block_size=32), CPU, 16).tokens_beside(16, 16) == 96
    assert _used(_default_pace(block_size=64), CPU, 16).tokens_beside(16, 16) == 64
    assert _used(_default_pace(block_size=128), CPU, 16).tokens_beside(16, 16) == 128


def test_the_few_do_not_make_a_crowd_wait() -> None:
    quick = _machine(0.010, 0.0001, 0.0001)
    pace = _used(PromptPace(100_000, 16), quick, 1, 40)
    alone, few, third, most = (pace.tokens_beside(*each) for each in ((1, 1), (1, 40), (14, 40), (39, 40)))
    assert alone < most < third < few
    assert quick(14, third) <= 0.15
    assert quick(1, few) <= 0.15


def test_the_gaps_of_most_are_no_longer_for_a_few_that_wait() -> None:
    quick = _machine(0.010, 0.0001, 0.0001)
    pace = _used(PromptPace(100_000, 16), quick, 1, 40)
    for replies in (20, 32, 39):
        assert quick(replies, pace.tokens_beside(replies, 40)) <= 3 * quick(40, 0)


def test_a_step_with_images_takes_twice_as_long_as_one_without_prompts() -> None:
    pace = _used(_default_pace(), CPU, 16)
    tokens = pace.tokens_beside(16, 16, images=True)
    assert CPU(16, tokens) <= 2 * CPU(16, 0) < CPU(16, tokens + 16)


def test_prompts_beside_the_first_replies_take_what_prompts_took_alone() -> None:
    pace = _default_pace()
    for _ in range(5):
        pace.observe(0, 512, CPU(0, 512))
    for _ in range(3):
        pace.observe(16, 0, CPU(16, 0))
    assert CPU(16, pace.tokens_beside(16, 16)) <= 3 * CPU(16, 0)


def test_a_crowd_makes_no_gap_longer_where_steps_take_long_anyway() -> None:
    slow = _machine(0.1, 0.01, 0.005)
    pace = _used(PromptPace(100_000, 16), slow, 1, 40)
    assert slow(1, pace.tokens_beside(1, 40)) <= 3 * slow(40, 0)
    assert pace.tokens_beside(20, 40) == pace.tokens_beside(40, 40)


def test_a_target_that_was_set_is_kept_for_the_few_too() -> None:
    pace = _used(PromptPace(4096, 16, 0.1), CPU, 1, 40)
    assert pace.tokens_beside(1, 40) == pace.tokens_beside(1, 1)


def test_a_step_that_was_held_up_changes_nothing() -> None:
    pace = _used(_default_pace(), CPU, 16, 16)
    before = pace.tokens_beside(16, 16)
    pace.observe(16, 0, 5.0)
    pace.observe(16, 256, 5.0)
    pace.observe(16, 0, 0.0)
    assert pace.tokens_beside(16, 16) == before


def test_a_few_prompt_tokens_tell_nothing() -> None:
    pace = _used(_default_pace(), CPU, 16)
    before = pace.tokens_beside(16, 16)
    for _ in range(100):
        pace.observe(16, 1, CPU(16, 0) + 0.005)
    assert pace.tokens_beside(16, 16) == before


def test_where_prompt_tokens_cost_nothing_a_step_takes_all_it_may() -> None:
    pace = _used(_default_pace(), _machine(0.010, 0.0, 0.0), 4)
    assert pace.tokens_beside(4, 4) == 4096


def test_a_machine_that_becomes_slower_is_noticed_within_seconds() -> None:
    pace = PromptPace(4096, 16, target_gap_s=0.2)
    before = _used(pace, CPU, 16).tokens_beside(16, 16)
    slower = _machine(0.030, 0.003, 0.0015)
    _used(pace, slower, *[16] * 6)
    after = pace.tokens_beside(16, 16)
    assert slower(16, after) <= 0.2 < CPU(16, before) * 3


def _gaps_while_a_prompt_is_computed(machine: Machine, pace: PromptPace) -> list[float]:
    """Returns the gaps between the tokens of three replies, beside which long prompts come one after the other."""
    simulation = Simulation(
        num_blocks=4000, block_size=16, pace=pace, step_seconds=machine, max_batch_prefill_tokens=4096
    )
    reply = simulation.submit([1, 2, 3], max_new_tokens=900)
    for first in (4, 5):
        simulation.submit([first, 2, 3], max_new_tokens=900)
    for _ in range(20):
        simulation.turn()
    gaps, at = [], simulation.seconds
    for round_ in range(6):
        prompt = simulation.submit([6 + round_] * 1000, max_new_tokens=1)
        while not prompt.ended:
            tokens = len(reply.tokens)
            simulation.turn()
            if len(reply.tokens) > tokens:
                gaps.append(simulation.seconds - at)
                at = simulation.seconds
    simulation.check_tokens()
    return gaps


@pytest.mark.parametrize("target_s", [None, 0.1])
def test_replies_keep_their_pace_while_long_prompts_are_computed(target_s: float | None) -> None:
    gaps = _gaps_while_a_prompt_is_computed(CPU, PromptPace(4096, 16, target_s))
    # A step of unmeasured cost comes first, and has been sent twice before it is measured.
    assert sum(gap > (target_s or 3 * CPU(4, 0) * (4 / 3) ** 2) for gap in gaps) <= 2
    assert max(gaps) < 0.25


def _alone(pace: PromptPace, machine: Machine, steps: int = 10) -> list[float]:
    """Lets steps of a long prompt pass while no reply runs. Returns their seconds."""
    seconds = []
    for _ in range(steps):
        tokens = pace.tokens_alone()
        seconds.append(machine(0, tokens))
        pace.observe(0, tokens, seconds[-1])
    return seconds


SLOW_CPU = _machine(0.1, 0.001, 0.013)


@pytest.mark.parametrize("replied", [False, True])
@pytest.mark.parametrize(
    ("machine", "tokens"), [(GPU, 4096), (CPU, 976), (_machine(0.06, 0.002, 0.006), 112), (SLOW_CPU, 48)]
)
def test_without_replies_a_step_takes_half_a_second_or_somewhat_longer(
    machine: Machine, tokens: int, replied: bool
) -> None:
    pace = _default_pace()
    if replied:
        pace.observe(1, 0, machine(1, 0))
    first, *others = _alone(pace, machine)
    assert first == machine(0, 128)
    assert max(others) <= (1.0 if replied or machine is not SLOW_CPU else machine(0, 64))
    if replied:
        assert pace.tokens_alone() == tokens


def test_a_model_whose_steps_take_long_has_most_of_their_time_for_prompts() -> None:
    large = _machine(0.8, 0.01, 0.02)
    pace = _default_pace()
    assert all(pace.tokens_alone() >= 64 for _ in _alone(pace, large))
    pace.observe(1, 0, large(1, 0))
    _alone(pace, large)
    assert 2.5 * large(0, 0) <= large(0, pace.tokens_alone()) <= 3.5 * large(0, 0)


def test_short_prompts_tell_little_about_long_ones() -> None:
    """A few tokens take hardly longer than one, where a step waits for the weights."""
    pace = _default_pace()
    for _ in range(20):
        pace.observe(1, 0, 0.1)
        pace.observe(0, 30, 0.101)
    assert max(_alone(pace, SLOW_CPU)) < 2


def test_a_machine_that_becomes_slower_has_shorter_steps_soon() -> None:
    pace = _default_pace()
    pace.observe(1, 0, CPU(1, 0))
    _alone(pace, CPU)
    assert max(_alone(pace, SLOW_CPU)[3:]) < 1
