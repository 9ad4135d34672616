"""What to tell the shards next."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from shared.stubs import generate_pb2 as pb
from tgi_server.router.scheduling.admission import AdmissionPolicy, Reason
from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.memory import Memory, Verdict
from tgi_server.router.scheduling.queue import WaitingQueue
from tgi_server.router.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")

Message = pb.PrefillRequest | pb.DecodeRequest | pb.FilterBatchRequest


@dataclass(slots=True)
class Call:
    """A call to be sent now.

    joined: the sequences that it takes from the queue. concat: why, when others were running already. preempted: how
    many sequences go back to the queue.
    """

    message: Message
    joined: list[Sequence] = field(default_factory=list)
    concat: Reason | None = None
    preempted: int = 0

    @property
    def is_step(self) -> bool:
        return not isinstance(self.message, pb.FilterBatchRequest)


class Planner:
    """Moves sequences from the queue into the batch and back, and says each move in a call.

    The caller sends what `next_call` returns, before it changes anything else. An exception in planning one sequence
    is told to `on_fault`, which takes that sequence out of queue and batch; the others are planned without it.
    """

    def __init__(
        self,
        queue: WaitingQueue,
        batch: Batch,
        memory: Memory,
        policy: AdmissionPolicy,
        pipeline_depth: int,
        on_fault: Callable[[Sequence], None],
    ) -> None:
        self._queue = queue
        self._batch = batch
        self._memory = memory
        self._policy = policy
        self._depth = pipeline_depth
        # When a step is sent, sequences have a slot for it, but forced tokens of the steps on their way are not known.
        self._lookahead = max(0, pipeline_depth - 2)
        self._on_fault = on_fault
        self._held_back: Call | None = None  # until the shards have forgotten who failed while it was planned
        self._steps_since_prefill = 0
        self._did_not_fit: tuple[int, int] | None = None  # request, and tokens held when there was no room for it

    def reset(self) -> None:
        """The shards have forgotten the batch, and with it whatever was planned for it."""
        self._held_back = None
        self._did_not_fit = None

    def next_call(self, steps_in_flight: int) -> Call | None:
        """None: nothing can be said before one of the steps on their way is answered, or another request comes."""
        batch = self._batch
        if batch.filter_due:
            return self._filter()
        if self._held_back is not None:
            held_back, self._held_back = self._held_back, None
            return held_back
        if steps_in_flight >= self._depth:
            return None
        if not self._memory.can_grow(len(batch.growing())):
            if steps_in_flight:
                return None  # they may free blocks, and their tokens belong to a sequence that must give way
            preempted = self._make_room()
            return self._filter(preempted)
        call = self._step()
        if call is not None:
            batch.sent()
            self._memory.sent()
        if batch.filter_due:
            self._held_back = call
            return self._filter()
        return call

    def _filter(self, preempted: int = 0) -> Call:
        self._batch.filter_due = False
        message = pb.FilterBatchRequest(batch_id=self._batch.id, keep_request_ids=self._batch.ids())
        return Call(message, preempted=preempted)

    def _make_room(self) -> int:
        """Preempts the youngest until all others can grow: how many. One that is alone always can."""
        preempted = 0
        while not self._memory.can_grow(len(self._batch.growing())):
            youngest = self._batch.youngest()
            preempted += self._alone(self._preempt, youngest) is not None
        return preempted

    def _preempt(self, sequence: Sequence) -> Sequence:
        self._batch.leave(sequence, ended_by_shards=False)
        self._memory.release(sequence)
        sequence.reset()
        self._queue.put_back(sequence)
        return sequence

    def _alone(self, plan: Callable[..., T], sequence: Sequence, *arguments: int) -> T | None:
        """Returns what `plan` makes of the sequence; None when it raises: then the sequence, and nobody else, fails."""
        try:
            return plan(sequence, *arguments)
        except Exception:
            logger.exception("request %d could not be planned", sequence.id)
            self._on_fault(sequence)
            return None

    def _all(self, plan: Callable[[Sequence], T | None], sequences: Iterable[Sequence]) -> list[T]:
        planned = [self._alone(plan, sequence) for sequence in sequences]
        return [each for each in planned if each is not None]

    def _step(self) -> Call | None:
        batch = self._batch
        grants = self._all(self._grow, batch.growing())
        decoding = batch.decoding()
        running = len(batch)
        chunks: list[pb.Chunk] = []
        budget = self._policy.prefill_budget(decoding and self._memory.chunks)
        for sequence in batch.prefilling():
            if budget > 0 and (chunk := self._alone(self._compute, sequence, budget)):
                chunks.append(chunk)
                budget -= chunk.tokens
        grants += self._all(self._grow_ahead, batch.leaping())
        reason = self._policy.reason_to_admit(running, len(self._queue), self._steps_since_prefill)
        joined = self._admit(budget, chunks) if reason is not None else []
        self._steps_since_prefill = 0 if joined else self._steps_since_prefill + 1
        chunks = [chunk for chunk in chunks if batch.get(chunk.request_id)]  # the others have failed since
        if chunks:
            prefill = pb.PrefillRequest(
                batch_id=batch.id,
                requests=[sequence.message for sequence in joined],
                chunks=chunks,
                grants=grants,
                decode=decoding,
            )
            return Call(prefill, joined, reason if joined and running else None)
        return Call(pb.DecodeRequest(batch_id=batch.id, grants=grants)) if decoding else None

    def _grow(self, sequence: Sequence) -> pb.Grant:
        block = self._memory.grow(sequence)
        self._batch.grown(sequence)
        return pb.Grant(request_id=sequence.id, block_ids=(block,))

    def _grow_ahead(self, sequence: Sequence) -> pb.Grant | None:
        return self._grow(sequence) if self._memory.can_grow(1) else None

    def _compute(self, sequence: Sequence, budget: int) -> pb.Chunk:
        tokens = min(sequence.remaining, budget) if self._memory.chunks else sequence.remaining
        self._batch.compute(sequence, tokens)
        self._memory.computed(sequence)
        return pb.Chunk(request_id=sequence.id, tokens=tokens)

    def _admit(self, budget: int, chunks: list[pb.Chunk]) -> list[Sequence]:
        """Takes requests from the queue, in order, as long as there is room, and adds their chunks."""
        joined: list[Sequence] = []
        while budget > 0 and len(self._batch) < self._policy.max_batch_size:
            sequence = self._queue.first()
            if sequence is None:
                break
            fits = self._alone(self._fits, sequence, budget, bool(joined))
            if fits is False:
                break
            if fits and (chunk := self._alone(self._join, sequence, budget)):
                joined.append(sequence)
                chunks.append(chunk)
                budget -= chunk.tokens
        return joined

    def _join(self, sequence: Sequence, budget: int) -> pb.Chunk:
        self._queue.take(sequence)
        self._batch.join(sequence)
        sequence.join(self._lookahead)
        return self._compute(sequence, budget)

    def _fits(self, sequence: Sequence, budget: int, others_joined: bool) -> bool:
        memory = self._memory
        if not memory.chunks and others_joined and sequence.remaining > budget:
            return False
        held = memory.held_tokens
        if self._did_not_fit is not None and self._did_not_fit[0] == sequence.id and held >= self._did_not_fit[1] > 0:
            return False
        # Each running sequence is left room to grow by a block, so that the newcomer is not preempted at once.
        growth = len(self._batch) * memory.block_size
        verdict = memory.admit(sequence, self._policy.total_budget(held, growth))
        self._did_not_fit = (sequence.id, held) if verdict is Verdict.FULL else None
        return verdict is Verdict.ADMITTED
