"""Whatever happens in whatever order, requests get the tokens that they would have got alone, and no block is lost."""

import asyncio
import tempfile
from math import inf
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.fakes.simulation import BREAKABLE, Fault, Simulation
from tgi_server.contract import Grammar, GrammarKind, SamplingParameters
from tgi_server.router.errors import CannotBeInTime, RequestTimedOut
from tgi_server.router.submission import KeptPrefix

# Few different tokens and prompts that continue each other: prefixes are shared, part inside blocks, and part again.
TOKENS = st.integers(1, 2)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=30)


SINK_METHODS = ("started", "push", "finished", "failed")
PLACES = (
    *BREAKABLE,
    *SINK_METHODS,
    "shard",
)


def _raise(*_: object) -> None:
    raise Fault("a sink breaks")


def _raise_cancelled(*_: object) -> None:
    raise asyncio.CancelledError


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 20),
        block_size=st.integers(1, 5),
        max_batch_size=st.integers(1, 6),
        chunk=st.integers(1, 12),
        prefill=st.integers(1, 30),
        late_end=st.booleans(),
        speculate=st.sampled_from((0, 0, 1, 4)),
        num_snapshots=st.sampled_from((0, 0, 1, 3, 20)),
        order=st.sampled_from(("as they come", "by class", "by class and share")),
        disk=st.sampled_from((None, None, 300, 1000, 100_000)),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_batch_size: int,
        chunk: int,
        prefill: int,
        late_end: bool,
        speculate: int,
        num_snapshots: int,
        order: str,
        disk: int | None,
    ) -> None:
        """disk: bytes of files with cached prefixes; None: there are none."""
        self.folder = tempfile.TemporaryDirectory()
        self.in_order = order == "as they come"
        self.late: set[int] = set()  # requests that have a deadline
        self.harmed: set[int] = set()  # requests that need not end as they should
        self.largest = num_blocks * block_size
        self.simulation = Simulation(
            num_blocks,
            block_size,
            late_end=late_end,
            max_batch_size=max_batch_size,
            max_batch_prefill_tokens=prefill,
            prefill_chunk_tokens=chunk,
            speculate=speculate,
            num_snapshots=num_snapshots,
            fair=order == "by class and share",
            disk=None if disk is None else (Path(self.folder.name), disk),
        )

    @rule(
        prompt=PROMPTS,
        max_new_tokens=st.integers(1, 24),
        ignore_eos=st.booleans(),
        stop_after=st.none() | st.integers(1, 6),
        seed=st.none() | st.integers(0, 3),
        prefill_logprobs=st.sampled_from((False, False, False, True)),
        adapter=st.sampled_from((None, None, "a", "b")),
        grammar=st.sampled_from((None, Grammar(GrammarKind.REGEX, "a*"))),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("pq"),
        seconds=st.none() | st.integers(0, 40),
        namespace=st.sampled_from(("", "", "n")),
    )
    def submit(
        self,
        prompt: list[int],
        max_new_tokens: int,
        ignore_eos: bool,
        stop_after: int | None,
        seed: int | None,
        prefill_logprobs: bool,
        adapter: str | None,
        grammar: Grammar | None,
        priority: int,
        tenant: str,
        seconds: int | None,
        namespace: str,
    ) -> None:
        prompt = prompt[: self.largest - 1]
        if self.in_order:
            priority, seconds = 0, None
        if seconds is not None:
            self.late.add(len(self.simulation.requests) + 1)
        self.simulation.submit(
            prompt,
            min(max_new_tokens, self.largest - len(prompt)),
            ignore_eos=ignore_eos,
            stop_after=stop_after,
            sampling=SamplingParameters(do_sample=seed is not None, seed=seed or 0),
            prefill_logprobs=prefill_logprobs,
            adapter_id=adapter,
            grammar=grammar,
            priority=priority,
            tenant=tenant,
            weight=2.0 if tenant == "p" else 1.0,
            deadline=inf if seconds is None else self.simulation.seconds + seconds,
            cache_namespace=namespace,
            keep=KeptPrefix(namespace, 20.0),  # so that it is stored, however short
        )

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data(), more=TOKENS, max_new_tokens=st.integers(1, 8), lost=st.booleans())
    def follow_up(self, data: st.DataObject, more: int, max_new_tokens: int, lost: bool) -> None:
        """A conversation goes on: the prompt is what was said so far, and a token more.

        lost: nothing is in memory any more, so that it is read from disk.
        """
        if lost and self.simulation.disk is not None:
            self.simulation.memory.rebuild(self.simulation.batch)
        request, sink, _ = self.simulation.requests[data.draw(st.sampled_from(sorted(self.simulation.requests)))]
        prompt = [*request.input_ids, *sink.tokens, more][: self.largest - 1]
        longest = min(max_new_tokens, self.largest - len(prompt))
        self.simulation.submit(prompt, longest, cache_namespace=request.cache_namespace, keep=request.keep)

    @precondition(lambda self: self.simulation.disk is not None and self.simulation.disk.transfers)
    @rule(data=st.data(), well=st.sampled_from((True, True, True, False)))
    def transfer(self, data: st.DataObject, well: bool) -> None:
        """A file has been read or written, or could not be."""
        disk = self.simulation.disk
        assert disk is not None
        disk.finish(data.draw(st.integers(0, disk.transfers - 1)), well=well)

    @precondition(lambda self: self.simulation.disk is not None)
    @rule(seconds=st.integers(1, 60))
    def time_passes(self, seconds: int) -> None:
        """What is read is late, or files are written again after a failure."""
        self.simulation.seconds += seconds

    @precondition(lambda self: self.simulation.disk is not None)
    @rule(namespace=st.sampled_from(("", "n")))
    def forget(self, namespace: str) -> None:
        self.simulation.forget(namespace)

    @rule()
    def send(self) -> None:
        self.simulation.send()

    @rule()
    def receive(self) -> None:
        self.simulation.receive()

    @rule(turns=st.integers(1, 12), quick_disk=st.booleans())
    def go_on(self, turns: int, quick_disk: bool) -> None:
        disk = self.simulation.disk
        for _ in range(turns):
            self.simulation.turn()
            while quick_disk and disk is not None and disk.transfers:
                disk.finish(0, well=True)
            self.books_are_in_order()

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.simulation.requests)))
        self.harmed.add(request_id)
        self.simulation.cancel(request_id)

    @rule(really=st.sampled_from((False, False, False, True)))
    def fail(self, really: bool) -> None:
        if really:
            self.simulation.fail()
            self.harmed |= set(self.simulation.requests)

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data(), place=st.sampled_from(PLACES), done=st.booleans())
    def break_one(self, data: st.DataObject, place: str, done: bool) -> None:
        """Something raises for one request, in the planner, in its sink, or in the shard."""
        request_id = data.draw(st.sampled_from(sorted(self.simulation.requests)))
        self.harmed.add(request_id)
        if place == "shard":
            self.simulation.shard.broken[request_id] = done
        elif place in SINK_METHODS:
            _, sink, _ = self.simulation.requests[request_id]
            setattr(sink, place, _raise_cancelled if done else _raise)
        else:
            self.simulation.break_scheduling(request_id, place, done=done)

    @invariant()
    def books_are_in_order(self) -> None:
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.batch.check()
        waiting = [sequence.id for sequence in simulation.waiting]
        if waiting and self.in_order:
            first = simulation.waiting.first()
            assert first is not None
            assert first.id == min(waiting), "the queue is out of order"
        for sequence in simulation.batch:
            if sequence.first_step is not None and not sequence.jumps:
                longest = min(sequence.known + simulation.batch.step - sequence.first_step, sequence.max_total_tokens)
                blocks = -(-longest // simulation.memory.block_size)
                assert len(sequence.blocks) <= blocks, f"request {sequence.id} has more blocks than it needs"

    def teardown(self) -> None:
        if not hasattr(self, "simulation"):
            return
        simulation = self.simulation
        simulation.run()
        simulation.close()
        self.folder.cleanup()
        simulation.check_tokens()
        for request_id, (_, sink, _) in simulation.requests.items():
            assert sink.ended or request_id in self.harmed, f"request {request_id} was lost"
            if request_id in self.late and isinstance(sink.error, RequestTimedOut | CannotBeInTime):
                continue
            assert sink.reason is not None or request_id in self.harmed, f"request {request_id} was harmed by another"
        assert not simulation.shard.rows
        assert simulation.memory.held_tokens == 0
        assert len(simulation.batch) == len(simulation.waiting) == 0
        simulation.batch.check()


def _run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.logs_tracebacks
def test_any_order() -> None:
    _run(settings().max_examples, steps=40)


@pytest.mark.slow
@pytest.mark.logs_tracebacks
@pytest.mark.timeout(1200)
def test_any_order_at_length() -> None:
    _run(examples=800, steps=80)
