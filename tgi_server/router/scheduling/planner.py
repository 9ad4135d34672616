"""Plans the next call to the shards: which sequences join, what is computed, which blocks are granted."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeVar

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import StateSave
from tgi_server.router.limits import Limits
from tgi_server.router.metrics import ConcatReason
from tgi_server.router.scheduling import calls
from tgi_server.router.scheduling.adapter_registry import Adapters
from tgi_server.router.scheduling.batch import Batch, WaitingQueue
from tgi_server.router.scheduling.deadlines import Forecast
from tgi_server.router.scheduling.memory import Verdict
from tgi_server.router.scheduling.order import Order, ShortPrompts
from tgi_server.router.scheduling.pace import PromptPace
from tgi_server.router.scheduling.prefix_disk import PrefixDisk
from tgi_server.router.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum number of unanswered steps. With two, the router handles the tokens of one step while the shards compute the
# next. With three, jump-forward tokens of a grammar could take the slots of steps that have been sent already.
STEPS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """TGI's policy: decides when waiting requests join the running ones. It has no state.

    Its measure of time is the number of decode steps.
    """

    limits: Limits

    def reason_to_admit(self, running: int, waiting: int, steps_since_prefill: int) -> ConcatReason | None:
        """Returns the reason why waiting requests should join now; None if they keep waiting."""
        limits = self.limits
        if waiting == 0 or running >= limits.max_batch_size:
            return None
        if 2 * running <= limits.max_batch_size:
            return ConcatReason.ROOM
        if waiting > running * limits.waiting_served_ratio:
            return ConcatReason.BACKPRESSURE
        if steps_since_prefill >= limits.max_waiting_tokens:
            return ConcatReason.WAIT_EXCEEDED
        return None

    def total_budget(self, held_tokens: int, growth_tokens: int) -> int:
        """Returns the number of KV slots that a request may take on admission, so that running ones can still grow."""
        return self.limits.max_batch_total_tokens - held_tokens - growth_tokens


# Maximum bytes of messages of the sequences that join in one step, as building and sending them blocks the event loop.
_JOINING_BYTES = 2**24


@dataclass(frozen=True, slots=True)
class FilterPlan:
    """The shards drop all sequences except `keep`. preempted: how many of the others return to the queue."""

    batch_id: int
    keep: list[int]
    preempted: int = 0

    def call(self) -> pb.Call:
        return calls.filter_call(self.batch_id, self.keep)


@dataclass(slots=True)
class StepPlan:
    """One step of the shards.

    decode: True if sequences past their prompt advance by a token. replies: their number, including sequences that have
    ended without the router knowing yet. grants: (request id, new block). saves: states to copy into snapshots.
    chunks: (request id, number of prompt tokens to compute). joined: sequences that leave the queue. reason: why they
    join running sequences; None if none runs. closing: ids of requests whose grammars have to complete their texts.
    """

    batch_id: int
    decode: bool = False
    replies: int = 0
    grants: list[tuple[int, int]] = field(default_factory=list)
    saves: list[StateSave] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    joined: list[Sequence] = field(default_factory=list)
    reason: ConcatReason | None = None
    closing: list[int] = field(default_factory=list)

    @property
    def is_prefill(self) -> bool:
        return bool(self.chunks)

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.chunks)

    def call(self) -> pb.Call:
        if not self.is_prefill:
            return calls.decode_call(self.batch_id, self.grants, self.saves, self.closing)
        joining = [
            (each.message, each.request.options.grammar, each.images.messages(each.cached)) for each in self.joined
        ]
        return calls.prefill_call(
            self.batch_id, joining, self.chunks, self.grants, self.saves, decode=self.decode, closing=self.closing
        )


class StepPlanner:
    """Moves sequences from the queue into the batch and back, and returns each move as a plan.

    The caller sends what `plan` returns, in this order, before it changes anything else. If planning one sequence
    raises an exception, `on_fault` removes it from queue and batch; the others are planned without it.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        batch: Batch,
        policy: AdmissionPolicy,
        pace: PromptPace,
        adapters: Adapters,
        order: Order,
        forecast: Forecast,
        clock: Callable[[], float],
        on_fault: Callable[[Sequence], None],
        disk: PrefixDisk | None = None,
    ) -> None:
        """forecast: estimates times, to meet deadlines. clock: returns seconds. disk: None: no prefixes are on disk."""
        self.awake: Callable[[], bool] = lambda: True  # False: only sequences that have begun may join
        self._disk = disk
        self._order = order
        self._forecast = forecast
        self._clock = clock
        self._short_prompts = ShortPrompts()
        self._long_step = False  # the last one that was planned
        self._waiting = waiting
        self._batch = batch
        self._policy = policy
        self._pace = pace
        self._on_fault = on_fault
        self._adapters = adapters
        self._steps_since_prefill = 0
        self._did_not_fit: tuple[int, int] | None = None  # request, and tokens held when there was no room for it
        self._urgent: set[int] = set()  # requests for which others have just been preempted

    def plan(self, steps_in_flight: int) -> list[FilterPlan | StepPlan]:
        """Returns the next call; none if it has to wait until a step in flight is answered, or another request comes.

        Returns two calls if a sequence fails while a step is planned: the shards drop it first.
        """
        batch = self._batch
        if batch.filter_due:
            return [self._filter()]
        if steps_in_flight >= (1 if self._long_step else STEPS_IN_FLIGHT):
            return []
        growing = batch.growing()
        short = not batch.memory.can_grow(len(growing))
        if short or self._must_give_way():
            if steps_in_flight:  # they may end sequences, and a preempted sequence needs all its tokens first
                return []
            preempted = self._make_room() if short else self._give_way()
            if short or batch.filter_due:
                return [self._filter(preempted)]
        step = self._step(growing)
        if step is not None:
            batch.sent()
            # No second step is sent, so that requests that come meanwhile need not wait for another long one.
            self._long_step = not (step.replies or self._pace.is_short(step.prompt_tokens))
        plans: list[FilterPlan | StepPlan] = [self._filter()] if batch.filter_due else []
        return plans if step is None else [*plans, step]

    def _filter(self, preempted: int = 0) -> FilterPlan:
        self._batch.filter_due = False
        return FilterPlan(self._batch.id, self._batch.ids(), preempted)

    def _make_room(self) -> int:
        """Preempts the sequences that are served last until all others can grow. Returns how many were preempted.

        A single sequence can always grow.
        """
        preempted = 0
        while not self._batch.memory.can_grow(len(self._batch.growing())):
            preempted += self._alone(self._preempt, self._order.last(self._batch)) is not None
        return preempted

    def _must_give_way(self) -> bool:
        """Returns True if running sequences have to be preempted for the waiting sequence that is served next."""
        first = self._order.first(self._waiting) if self._batch.memory.chunks and len(self._batch) else None
        if first is None or self._has_room(first) or self._order.gives_way(first, list(self._batch)) is None:
            return False
        return self._may_join(first)

    def _give_way(self) -> int:
        """Preempts running sequences for waiting ones that are served before them and that the next step can start.

        Returns how many were preempted.
        """
        preempted, budget = 0, self._prefill_budget(self._batch.replies)
        claiming: list[Sequence] = []
        for sequence in self._order.arrange(self._waiting):
            while not self._has_room(sequence, len(claiming)):
                victim = self._order.gives_way(sequence, [*self._batch, *claiming])
                if victim is None or victim not in self._batch:
                    return preempted
                preempted += self._alone(self._preempt, victim) is not None
                self._urgent.add(sequence.id)
            claiming.append(sequence)
            budget -= sequence.remaining
            if budget <= 0:
                break
        return preempted

    def _has_room(self, sequence: Sequence, claimed: int = 0) -> bool:
        """Returns False if the batch lacks a place or memory for a sequence beside `claimed` others that will join."""
        batch = self._batch
        if len(batch) + claimed >= self._policy.limits.max_batch_size:
            return False
        if not self._lacked_memory(sequence):
            return True
        block = batch.memory.block_size
        free = self._policy.total_budget(batch.memory.held_tokens, growth_tokens=len(batch) * block)
        return free > sequence.remaining + block

    def _lacked_memory(self, sequence: Sequence) -> bool:
        """Returns True if the sequence was tried and did not fit, and no less memory is held now than then."""
        tried = self._did_not_fit
        return tried is not None and tried[0] == sequence.id and self._batch.memory.held_tokens >= tried[1] > 0

    def _preempt(self, sequence: Sequence) -> Sequence:
        self._batch.leave(sequence)
        sequence.preempt()
        self._waiting.put_back(sequence)
        return sequence

    def _step(self, growing: Iterable[Sequence]) -> StepPlan | None:
        """Plans a step; None if there is nothing to compute. growing: sequences that need one more block."""
        batch = self._batch
        plan = StepPlan(batch.id)
        self._grow(plan, growing)
        plan.decode = batch.decoding()
        plan.replies = batch.replies if plan.decode else 0
        running = len(batch)
        self._grow(plan, (sequence for sequence in batch.jumping() if batch.memory.can_grow(1)))
        closing = [each for each in batch.closable() if self._forecast.has_to_close(each, self._clock())]
        plan.closing = [each.id for each in closing]
        for sequence in closing:
            sequence.close()
        prefilling = self._order.arrange(batch.prefilling())
        budget = self._admit(plan, self._prefill_budget(plan.replies), self._overtaking())
        budget = self._prefill_short_first(plan, prefilling, budget)
        reason = ConcatReason.PREEMPTION if plan.joined else None
        if usual := self._reason_to_admit():
            reason = reason or usual
            self._admit(plan, budget, self._order.arrange(self._waiting))
        self._steps_since_prefill = 0 if plan.joined else self._steps_since_prefill + 1
        plan.reason = reason if running else None
        plan.chunks = [chunk for chunk in plan.chunks if batch.get(chunk[0])]  # the others have failed since
        plan.saves = [save for save in batch.memory.saves() if batch.get(save.request_id)]
        return plan if plan.chunks or plan.decode else None

    def _prefill_budget(self, replies: int) -> int:
        """Returns how many prompt tokens the next step may compute in addition to the replies that it continues."""
        limits = self._policy.limits
        if not self._batch.memory.chunks:
            return limits.max_batch_prefill_tokens
        if not replies:
            return min(self._pace.tokens_alone(), limits.max_batch_prefill_tokens)
        expected = min(len(self._batch) + len(self._waiting), limits.max_batch_size)
        prompts = (*self._batch.prefilling(), self._waiting.first())
        images = any(each.request.images for each in prompts if each is not None)
        return self._pace.tokens_beside(replies, expected, images=images)

    def _grow(self, plan: StepPlan, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            block = self._alone(self._batch.grow, sequence)
            if block is not None:
                plan.grants.append((sequence.id, block))

    def _prefill_short_first(self, plan: StepPlan, prefilling: list[Sequence], budget: int) -> int:
        """Adds chunks of begun prompts, and of shorter ones that overtake the first. Returns the rest of the budget."""
        first = prefilling[0] if prefilling and self._batch.memory.chunks else None
        if first is None or first.remaining <= budget or not self._forecast.can_wait(first, self._clock()):
            return self._prefill(plan, prefilling, budget)
        left = budget
        for sequence in self._short_prompts.passing(first, [*prefilling, *self._joinable()]):
            if sequence in self._batch:
                left = self._prefill(plan, [sequence], left)
            elif (rest := self._admit(plan, left, [sequence])) < left:
                left = rest
            else:
                break  # there is no room for it
        begun = {request_id for request_id, _ in plan.chunks}
        rest = self._prefill(plan, (each for each in prefilling if each.id not in begun), left)
        self._short_prompts.computed(budget - left, own=dict(plan.chunks).get(first.id, 0))
        return rest

    def _joinable(self) -> Iterable[Sequence]:
        """Returns the waiting sequences if some may join now and the first of them does not lack memory; else none."""
        first = self._order.first(self._waiting) if self._reason_to_admit() is not None else None
        return () if first is None or self._lacked_memory(first) else self._waiting

    def _prefill(self, plan: StepPlan, sequences: Iterable[Sequence], budget: int) -> int:
        """Adds chunks of prompts that have begun. Returns the rest of the budget."""
        for sequence in sequences:
            if budget > 0 and (tokens := self._alone(self._batch.compute, sequence, budget)):
                plan.chunks.append((sequence.id, tokens))
                budget -= tokens
        return budget

    def _reason_to_admit(self) -> ConcatReason | None:
        running = len(self._batch)
        usual = self._policy.reason_to_admit(running, len(self._waiting), self._steps_since_prefill)
        if usual is None and len(self._waiting) and running < self._policy.limits.max_batch_size:
            first = self._waiting.first()
            pressing = first is not None and self._forecast.is_pressing(first, self._clock())
            return ConcatReason.DEADLINE if pressing else None
        return usual

    def _overtaking(self) -> list[Sequence]:
        """Returns the waiting sequences that join before running prompts are continued, as they are served earlier."""
        urgent, self._urgent = self._urgent, set()
        if not (urgent or self._order.may_overtake(self._waiting, self._batch)):
            return []
        running = list(self._batch)

        def overtakes(sequence: Sequence) -> bool:
            return sequence.id in urgent or self._order.gives_way(sequence, running) is not None

        return list(takewhile(overtakes, self._order.arrange(self._waiting)))

    def _admit(self, plan: StepPlan, budget: int, sequences: Iterable[Sequence]) -> int:
        """Admits sequences from the queue, in order, as long as there is room, and adds their first chunks.

        Returns the rest of the budget.

        Sequences whose adapters are not ready can be overtaken for `max_waiting_tokens` steps. After that no sequence
        with an adapter overtakes them, so that the shards' memory for adapters becomes free.
        """
        in_order = False
        room = _JOINING_BYTES
        for sequence in sequences:
            if budget <= 0 or room <= 0 or len(self._batch) >= self._policy.limits.max_batch_size:
                return budget
            if (in_order and sequence.adapter is not None) or not self._may_join(sequence):
                in_order = in_order or self._waits_too_long(sequence)
                continue
            admitted = self._alone(self._fits, sequence, budget, bool(plan.joined))
            if admitted is False:
                return budget
            if admitted and (tokens := self._alone(self._batch.compute, sequence, budget)):
                plan.joined.append(sequence)
                plan.chunks.append((sequence.id, tokens))
                budget -= tokens
                room -= sequence.size
        return budget

    def _may_join(self, sequence: Sequence) -> bool:
        """Returns False while a sequence's adapter is not loaded, its prefix is being read, or the model sleeps."""
        if not (sequence.started or self.awake()):
            return False
        ready = sequence.adapter is None or self._adapters.prepare(sequence.adapter)
        if not ready:
            sequence.wait_for_place(self._batch.step)
        return ready and (self._disk is None or self._disk.prepare(sequence))

    def _waits_too_long(self, sequence: Sequence) -> bool:
        """Returns True if a sequence's adapter has waited for `max_waiting_tokens` steps without being loaded."""
        adapter, since = sequence.adapter, sequence.without_place_since
        if adapter is None or since is None or adapter.loading is not None:
            return False
        return self._batch.step - since > self._policy.limits.max_waiting_tokens

    def _fits(self, sequence: Sequence, budget: int, others_joined: bool) -> bool:
        """Moves the sequence from the queue to the batch. Returns False if there is no room for it."""
        memory = self._batch.memory
        if not memory.chunks and others_joined and sequence.remaining > budget:
            return False
        held = memory.held_tokens
        if self._lacked_memory(sequence):
            return False
        growth = len(self._batch) * memory.block_size  # a block for each, lest the new one be preempted at once
        verdict = self._batch.admit(sequence, self._policy.total_budget(held, growth))
        self._did_not_fit = (sequence.id, held) if verdict is Verdict.FULL else None
        if verdict is not Verdict.ADMITTED:
            return False
        self._waiting.leave(sequence)
        return True

    def _alone(self, plan: Callable[..., T], sequence: Sequence, *arguments: int) -> T | None:
        """Returns the result of `plan` for the sequence. If `plan` raises, fails the sequence and returns None."""
        try:
            return plan(sequence, *arguments)
        except Exception:
            logger.exception("request %d could not be planned", sequence.id)
            self._on_fault(sequence)
            return None
