import sys
from collections.abc import Iterable
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.stubs import generate_pb2 as pb
from tests.fakes.simulation import Simulation, batch_limits
from tgi_server.contract import FinishReason, Grammar, GrammarKind, SamplingParameters
from tgi_server.router.metrics import ConcatReason
from tgi_server.router.scheduling import planner
from tgi_server.router.scheduling.planner import STEPS_IN_FLIGHT, AdmissionPolicy, FilterPlan

POLICY = AdmissionPolicy(
    batch_limits(
        max_batch_size=10,
        max_batch_prefill_tokens=4096,
        max_batch_total_tokens=1000,
        max_waiting_tokens=20,
        waiting_served_ratio=0.5,
    )
)


@pytest.mark.parametrize(
    ("running", "waiting", "steps", "reason"),
    [
        (0, 0, 100, None),
        (0, 1, 0, ConcatReason.ROOM),
        (5, 1, 0, ConcatReason.ROOM),
        (6, 1, 0, None),
        (6, 3, 0, None),
        (6, 4, 0, ConcatReason.BACKPRESSURE),
        (6, 1, 19, None),
        (6, 1, 20, ConcatReason.WAIT_EXCEEDED),
        (9, 1, 20, ConcatReason.WAIT_EXCEEDED),
        (10, 100, 1000, None),
    ],
)
def test_when_waiting_requests_are_taken_in(
    running: int, waiting: int, steps: int, reason: ConcatReason | None
) -> None:
    assert POLICY.reason_to_admit(running, waiting, steps) is reason


def test_a_newcomer_leaves_the_others_room_to_grow() -> None:
    assert POLICY.total_budget(held_tokens=700, growth_tokens=100) == 200


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
            joining = waiting[: self.policy.limits.max_batch_size - len(running)] if reason else []
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
    assert clock.waits[6] == POLICY.limits.max_waiting_tokens


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
    limits = batch_limits(
        max_batch_size=max_batch_size, max_waiting_tokens=max_waiting_tokens, waiting_served_ratio=ratio
    )
    clock = Clock(AdmissionPolicy(limits), arrivals, length)
    clock.run()
    assert len(clock.waits) == len(arrivals)
    assert max(clock.sizes, default=0) <= max_batch_size
    # Each wave of at most `max_batch_size` requests before it costs a wait and a generation.
    waves = len(arrivals) // max_batch_size + 1
    assert max(clock.waits, default=0) <= waves * (max_waiting_tokens + length + 1)


def chunks(message: pb.PrefillRequest) -> dict[int, int]:
    return {chunk.request_id: chunk.tokens for chunk in message.chunks}


def test_a_request_runs_to_its_end() -> None:
    simulation = Simulation()
    sink = simulation.submit([1, 2, 3], max_new_tokens=5)
    simulation.run()
    assert (sink.reason, len(sink.tokens), sink.starts) == (FinishReason.LENGTH, 5, 1)
    simulation.check_tokens()
    assert simulation.memory.held_tokens == 0


def test_requests_join_and_leave_the_running_batch_at_every_step() -> None:
    simulation = Simulation(num_blocks=40)
    first = simulation.submit([1, 2, 3], max_new_tokens=20)
    for _ in range(5):
        simulation.turn()
    second = simulation.submit([4, 5], max_new_tokens=2)
    for _ in range(6):
        simulation.turn()
    assert second.ended
    assert not first.ended
    joining = simulation.prefills()[-1]
    assert (joining.decode, [request.id for request in joining.requests]) == (True, [2])
    simulation.run()
    simulation.check_tokens()


def test_no_more_steps_are_on_their_way_than_the_pipeline_holds() -> None:
    simulation = Simulation()
    simulation.submit([1, 2, 3], max_new_tokens=20)
    sent = 0
    while simulation.send():
        sent += 1
    assert sent == STEPS_IN_FLIGHT


def test_no_step_is_sent_for_tokens_that_are_not_due() -> None:
    simulation = Simulation()
    simulation.submit([1, 2, 3], max_new_tokens=1)
    while simulation.send():
        pass
    assert len(simulation.sent) == 1


def test_a_long_prompt_rides_along_in_chunks_and_no_stream_misses_a_step() -> None:
    simulation = Simulation(num_blocks=100, prefill_chunk_tokens=16)
    stream = simulation.submit([8, 9], max_new_tokens=30)
    for _ in range(3):
        simulation.turn()
    before, sent = len(stream.tokens), len(simulation.sent)
    long = simulation.submit([1 + position % 7 for position in range(120)], max_new_tokens=3)
    while not long.tokens:
        simulation.turn()
    steps = [message for message in simulation.prefills() if 2 in chunks(message)]
    assert [chunks(message)[2] for message in steps] == [16] * 7 + [8]
    assert all(message.decode for message in steps)
    assert simulation.shard.largest_step == 16
    assert len(stream.tokens) - before >= len(simulation.sent) - sent - 2
    simulation.run()
    simulation.check_tokens()


def test_alone_a_prompt_is_computed_in_as_large_steps_as_allowed() -> None:
    simulation = Simulation(num_blocks=100, max_batch_prefill_tokens=64, prefill_chunk_tokens=16)
    simulation.submit([1 + position % 7 for position in range(100)], max_new_tokens=2)
    simulation.run()
    assert [chunks(message)[1] for message in simulation.prefills()] == [64, 36]


def test_only_sequences_that_fill_a_block_are_granted_another() -> None:
    simulation = Simulation(block_size=4, num_blocks=40)
    simulation.submit([1, 2, 3], max_new_tokens=12)
    simulation.submit([1, 2, 3, 4, 5], max_new_tokens=12)
    simulation.run()
    granted = [[grant.request_id for grant in message.grants] for message in simulation.steps()]
    assert granted[:11] == [[], [], [1], [], [2], [], [1], [], [2], [], [1]]
    assert all(len(grant.block_ids) == 1 for message in simulation.steps() for grant in message.grants)


def test_a_client_that_goes_away_frees_its_slot_at_once() -> None:
    simulation = Simulation()
    gone = simulation.submit([1, 2, 3], max_new_tokens=50)
    stays = simulation.submit([4, 5], max_new_tokens=8)
    for _ in range(3):
        simulation.turn()
    tokens = len(gone.tokens)
    simulation.cancel(1)
    assert len(simulation.batch) == 1
    (plan,) = simulation.send()
    assert isinstance(plan, FilterPlan)
    assert plan.keep == [2]
    assert list(simulation.shard.rows) == [2]
    simulation.run()
    assert (len(gone.tokens), gone.ended) == (tokens, False)
    assert len(stays.tokens) == 8
    simulation.check_tokens()
    simulation.memory.check(())


def test_a_client_that_goes_away_from_a_long_prompt_leaves_what_was_computed() -> None:
    simulation = Simulation(num_blocks=64, max_batch_prefill_tokens=16)
    prompt = [position % 23 + 1 for position in range(100)]
    simulation.submit(prompt)
    simulation.turn()
    progress = simulation.cancel(1)
    computed = simulation.shard.rows[1].computed
    assert progress == f"{computed} of 100 tokens of its prompt were computed; they stay in the prefix cache"
    assert 0 < computed < 100
    simulation.submit(prompt)
    simulation.run()
    (again,) = simulation.prefills()[-1].requests or simulation.prefills()[2].requests
    assert again.cached_tokens == computed
    assert simulation.cancel(2) == ""


def test_a_client_that_goes_away_while_its_request_waits_leaves_nothing() -> None:
    simulation = Simulation()
    simulation.submit([1, 2, 3])
    assert simulation.cancel(1) == "it waited for a place in a batch"


def test_after_a_stop_sequence_nothing_more_is_delivered() -> None:
    simulation = Simulation()
    sink = simulation.submit([1, 2, 3], max_new_tokens=50, stop_after=3)
    simulation.run()
    assert (len(sink.tokens), sink.reason) == (3, FinishReason.STOP_SEQUENCE)
    assert isinstance(simulation.sent[-1], FilterPlan)
    assert not simulation.shard.rows


def test_the_youngest_gives_way_and_resumes_unnoticed() -> None:
    simulation = Simulation(num_blocks=8, block_size=4)
    sampling = SamplingParameters(do_sample=True, seed=7)
    oldest = simulation.submit([1, 2, 3, 4], max_new_tokens=24, sampling=sampling)
    youngest = simulation.submit([5, 6, 7, 8], max_new_tokens=24, sampling=sampling)
    simulation.run()
    assert sum(plan.preempted for plan in simulation.sent if isinstance(plan, FilterPlan)) >= 1
    resumed = [
        request for message in simulation.prefills() for request in message.requests if len(request.generated_ids)
    ]
    assert {request.id for request in resumed} == {2}
    assert len(oldest.tokens) == len(youngest.tokens) == 24
    assert youngest.starts == 1
    simulation.check_tokens()


def test_what_a_preempted_request_had_computed_is_used_again() -> None:
    simulation = Simulation(num_blocks=10, block_size=4)
    simulation.submit([1, 2, 3, 4], max_new_tokens=24)
    simulation.submit([5, 6, 7, 8], max_new_tokens=24)
    simulation.run()
    (resumed,) = [request for message in simulation.prefills() for request in message.requests if request.generated_ids]
    assert resumed.cached_tokens > 0
    simulation.check_tokens()


def test_one_that_fills_all_blocks_alone_ends() -> None:
    simulation = Simulation(num_blocks=6, block_size=4)
    for _ in range(3):
        simulation.submit([1, 2, 3, 4, 5], max_new_tokens=19)
    simulation.run()
    simulation.check_tokens()
    assert all(sink.reason is FinishReason.LENGTH for _, sink, _ in simulation.requests.values())


def test_a_prompt_that_was_computed_is_shared_to_the_token() -> None:
    simulation = Simulation(block_size=4, num_blocks=40)
    simulation.submit([1, 2, 3, 4, 5, 6, 7], max_new_tokens=2)
    simulation.run()
    simulation.submit([1, 2, 3, 4, 5, 6, 9], max_new_tokens=2)
    simulation.run()
    request = simulation.prefills()[-1].requests[0]
    assert request.cached_tokens == 6
    assert request.copy.tokens == 2
    assert request.copy.target == request.block_ids[1]
    simulation.check_tokens()


def test_of_a_prompt_that_is_cached_whole_the_last_token_is_computed() -> None:
    simulation = Simulation(block_size=4, num_blocks=40)
    for _ in range(2):
        simulation.submit([1, 2, 3, 4, 5, 6, 7, 8], max_new_tokens=2)
        simulation.run()
    message = simulation.prefills()[-1]
    assert message.requests[0].cached_tokens == 7
    assert chunks(message) == {2: 1}
    simulation.check_tokens()


def test_a_conversation_goes_on_where_it_ended() -> None:
    simulation = Simulation(block_size=4, num_blocks=40)
    answer = simulation.submit([1, 2, 3, 4, 5], max_new_tokens=6)
    simulation.run()
    simulation.submit([1, 2, 3, 4, 5, *answer.tokens, 9, 9], max_new_tokens=2)
    simulation.run()
    assert simulation.prefills()[-1].requests[0].cached_tokens == 10  # all but the last generated one
    simulation.check_tokens()


def test_prompts_that_come_together_share_a_long_beginning() -> None:
    system = [1 + position % 7 for position in range(80)]
    simulation = Simulation(num_blocks=200, max_batch_prefill_tokens=256)
    for last in range(10, 14):
        simulation.submit([*system, last], max_new_tokens=2)
    simulation.run()
    cached = [request.cached_tokens for message in simulation.prefills() for request in message.requests]
    assert cached == [0, 80, 80, 80]
    simulation.check_tokens()


def test_short_prompts_that_come_together_start_together() -> None:
    simulation = Simulation(num_blocks=200)
    for _ in range(4):
        simulation.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], max_new_tokens=4)
    simulation.run()
    assert [len(message.requests) for message in simulation.prefills()] == [4]
    simulation.check_tokens()


def test_requests_with_long_grammars_do_not_all_start_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "_JOINING_BYTES", 2_000)
    simulation = Simulation(num_blocks=200)
    for _ in range(4):
        simulation.submit([1, 2, 3], max_new_tokens=4, grammar=Grammar(GrammarKind.REGEX, "a" * 1_500))
    simulation.run()
    assert [len(message.requests) for message in simulation.prefills()] == [2, 2]


def test_whoever_wants_the_prompts_logprobs_has_it_computed() -> None:
    simulation = Simulation(num_blocks=40)
    for _ in range(2):
        sink = simulation.submit([1, 2, 3, 4, 5], max_new_tokens=2, prefill_logprobs=True)
        simulation.run()
        assert sink.prefill_ids == [1, 2, 3, 4, 5]
    assert [message.requests[0].cached_tokens for message in simulation.prefills()] == [0, 0]


def test_a_failed_batch_fails_all_its_requests_and_no_other() -> None:
    simulation = Simulation(max_batch_size=2)
    sinks = [simulation.submit([1, 2, 3, token], max_new_tokens=9) for token in range(3)]
    for _ in range(3):
        simulation.turn()
    simulation.fail()
    assert [sink.error is not None for sink in sinks] == [True, True, False]
    assert simulation.memory.held_tokens == simulation.memory.cached_tokens == 0
    simulation.run()
    assert sinks[2].reason is FinishReason.LENGTH
    simulation.check_tokens()


@pytest.mark.logs_tracebacks
def test_a_sink_that_breaks_harms_nobody_else() -> None:
    simulation = Simulation()
    broken = simulation.submit([1, 2, 3], max_new_tokens=9)
    sound = simulation.submit([1, 2, 4], max_new_tokens=9)
    broken.push = lambda generation: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    simulation.run()
    assert broken.error is not None
    assert sound.reason is FinishReason.LENGTH
    assert simulation.memory.held_tokens == 0


def test_padded_models_get_whole_prompts_and_no_blocks() -> None:
    simulation = Simulation(num_blocks=50, paged=False, prefill_chunk_tokens=8)
    for length in (5, 30, 12):
        simulation.submit([1 + position % 5 for position in range(length)], max_new_tokens=6)
        simulation.turn()
    simulation.run()
    simulation.check_tokens()
    assert all(not request.block_ids for message in simulation.prefills() for request in message.requests)


def test_padded_batches_stay_within_their_rectangle() -> None:
    simulation = Simulation(num_blocks=10, block_size=4, paged=False)
    for _ in range(2):
        simulation.submit([1, 2, 3], max_new_tokens=7)
    simulation.submit([1, 2, 3], max_new_tokens=17)
    simulation.turn()
    assert simulation.batch.ids() == [1, 2]  # a third row would make it 3 times 20 of 40 tokens
    simulation.run()
    simulation.check_tokens()
    assert simulation.memory.held_tokens == 0


def _calls_of_a_turn(simulation: Simulation) -> int:
    """Python functions of the scheduling that one turn enters."""
    calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "scheduling" in frame.f_code.co_filename

    sys.setprofile(count)
    simulation.turn()
    sys.setprofile(None)
    return calls


def test_a_step_costs_as_much_with_a_long_context_as_with_a_short_one() -> None:
    costs = []
    for length in (10, 2000):
        simulation = Simulation(num_blocks=1000, block_size=16, max_batch_prefill_tokens=9000)
        for first in range(1, 5):
            simulation.submit([first] * length, max_new_tokens=40)
        while simulation.waiting.first() or simulation.batch.prefilling():
            simulation.turn()
        costs.append(sum(_calls_of_a_turn(simulation) for _ in range(16)))  # each fills a block once
    assert costs[0] == costs[1]
