"""The one task that owns all batching state and drives the shards."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from math import ceil, isfinite
from time import perf_counter

from shared.stubs import generate_pb2 as pb
from tgi_server.contract import FinishReason
from tgi_server.router.errors import (
    CannotBeInTime,
    GenerationFailed,
    InvalidRequest,
    NoSuchAdapter,
    RequestTimedOut,
    RouterError,
)
from tgi_server.router.limits import Limits
from tgi_server.router.metrics import Metrics
from tgi_server.router.scheduling import calls
from tgi_server.router.scheduling.adapter_registry import Adapter, Adapters
from tgi_server.router.scheduling.batch import Batch, WaitingQueue
from tgi_server.router.scheduling.deadlines import DeadlineAlarm, Forecast
from tgi_server.router.scheduling.early_answers import EarlyAnswers
from tgi_server.router.scheduling.image_encoding import ImageEncoding
from tgi_server.router.scheduling.image_places import MOST_WHOLE
from tgi_server.router.scheduling.memory import PaddedMemory, PagedMemory
from tgi_server.router.scheduling.order import Order
from tgi_server.router.scheduling.pace import PromptPace
from tgi_server.router.scheduling.planner import AdmissionPolicy, FilterPlan, StepPlan, StepPlanner
from tgi_server.router.scheduling.prefix_disk import DiskPrefixes, PrefixDisk
from tgi_server.router.scheduling.report import BatchReport
from tgi_server.router.scheduling.sequence import SINK_FAULTS, Outcome, Sequence, tell_end
from tgi_server.router.scheduling.shard_client import PendingResponse, ShardedClient
from tgi_server.router.scheduling.sleep_mode import SleepMode
from tgi_server.router.submission import PreparedRequest, Sink

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sent:
    """A call in flight. at: when it was sent, in seconds of the scheduler's clock."""

    plan: StepPlan | FilterPlan
    pending: PendingResponse
    at: float


class Scheduler:
    """Receives requests from the API (`submission.Submitter`), and pushes their tokens into their sinks.

    Its task sleeps while there is nothing to do. A fault of one request ends only that request. If a call fails, all
    requests in the batch fail with GenerationFailed; once the shards have shown that they work, it continues with the
    waiting requests.
    """

    def __init__(
        self,
        shards: ShardedClient,
        info: pb.InfoResponse,
        capacity: pb.WarmupResponse,
        limits: Limits,
        metrics: Metrics,
        pace: PromptPace,
        *,
        adapters: Adapters | None = None,
        prefix_caching: bool = True,
        disk: DiskPrefixes | None = None,
        fair: bool = False,
        admission: bool = True,
        target_gap_ms: float = 0.0,
        clock: Callable[[], float] = perf_counter,
        idle_check_after_s: float = 1.0,
        recovery_timeout_s: float = 5.0,
        recovery_interval_s: float = 1.0,
    ) -> None:
        """info, capacity: the shards' responses to Info and Warmup.

        adapters: the adapters that requests may name; None: no adapters.
        prefix_caching: True caches computed tokens for other requests. disk: stores cached prefixes in files, too.
        fair: True if tenants get shares of the tokens in proportion to their weights.
        admission: True refuses requests that would certainly miss their deadlines.
        target_gap_ms: target time between two tokens while images are encoded; 0: the shards' default.
        pace: limits the prompt tokens of a step. clock: returns seconds.
        idle_check_after_s: seconds without work after which the block allocator and the prefix cache are checked once.
        recovery_timeout_s, recovery_interval_s: after a failure, the time-out of a health check of the shards, and the
            time between two checks.
        """
        self._shards = shards
        self._report = BatchReport(metrics, info, capacity)
        self._speculates = info.speculate > 0
        self._pace = pace
        self._clock = clock
        self._answered_at = clock()  # when the last response came
        self._idle_check_after_s = idle_check_after_s
        self._recovery_timeout_s = recovery_timeout_s
        self._recovery_interval_s = recovery_interval_s
        self.waiting = WaitingQueue()
        self.batch = Batch(
            PagedMemory(
                capacity.num_blocks,
                info.block_size,
                prefix_caching=prefix_caching and not (info.states and not capacity.num_snapshots),
                num_snapshots=capacity.num_snapshots if prefix_caching else 0,
                clock=clock,
            )
            if info.paged
            else PaddedMemory(limits.max_batch_total_tokens),
            whole_images=info.whole_images,
        )
        self._longest_image = min(limits.max_batch_prefill_tokens, MOST_WHOLE) if info.whole_images else None
        self._encoding = ImageEncoding(shards, self._queue, self._end, target_gap_ms, metrics.images)
        self._adapters = Adapters(shards, max_loras=1) if adapters is None else adapters
        self._order = Order(fair=fair)
        self.early = EarlyAnswers(self._enter, self._start, self._end, self.cancel, metrics.early_answers, clock)
        self._admission = admission
        self._forecast = Forecast(limits)
        self._work, self._answered = asyncio.Event(), asyncio.Event()
        self.disk: PrefixDisk | None = None
        if disk is not None:
            self.disk = PrefixDisk(disk, shards, self.batch, self.next_response, self._forecast, metrics, self._work)
        self._planner = StepPlanner(
            self.waiting,
            self.batch,
            AdmissionPolicy(limits),
            pace,
            self._adapters,
            self._order,
            self._forecast,
            clock,
            self._drop_broken,
            self.disk,
        )
        self._in_flight: deque[_Sent] = deque()
        state = self.waiting, self.batch, self._in_flight, self.disk
        self.sleep_mode = SleepMode(shards, *state, self._work.set, self._fail_waiting, metrics.sleep, clock)
        self._planner.awake = lambda: self.sleep_mode.awake
        self._steps_in_flight = 0
        self._adapters.on_ready = self._work.set
        self._adapters.on_failure = self._fail_adapter
        self._adapters.in_use = self.batch.uses
        self._task: asyncio.Task[None] | None = None
        self._alarm = DeadlineAlarm(self.expire, clock)
        self._unhealthy: RouterError | None = None
        self._unchecked = True  # something may have run since the last check

    @property
    def healthy(self) -> bool:
        """False while the shards do not recover from a failure."""
        return self._unhealthy is None

    @property
    def unanswered_seconds(self) -> float:
        """Seconds for which the shards have not answered the oldest call; 0 if no call is in flight."""
        return self._clock() - max(self._in_flight[0].at, self._answered_at) if self._in_flight else 0.0

    async def next_response(self) -> None:
        """Waits until the shards have answered a step."""
        self._answered.clear()
        await self._answered.wait()

    def submit(self, request: PreparedRequest, sink: Sink) -> None:
        """Queues the request. Fails it at once if the shards are unhealthy, it is invalid, or it would be too late."""
        if self._unhealthy is not None:
            tell_end(request.id, sink, self._unhealthy)
            return
        try:
            adapter = self._adapters.find(request.options.adapter_id) if request.options.adapter_id else None
            sequence = Sequence(request, sink, self._speculates, adapter, self._clock())
            self.batch.memory.check_length(sequence)
            self._check_images(request)
            self._check_time(sequence)
        except (InvalidRequest, NoSuchAdapter, CannotBeInTime, RequestTimedOut) as error:
            tell_end(request.id, sink, error)
        else:
            self._alarm.add(sequence.deadline)
            self.early.begin(sequence)

    def _enter(self, sequence: Sequence) -> None:
        """Queues a request, once its images have been computed."""
        if unseen := self.batch.memory.unseen(sequence) if sequence.request.images else []:
            self._encoding.begin(sequence, unseen)
        else:
            self._queue(sequence)

    def _queue(self, sequence: Sequence) -> None:
        if self._unhealthy is not None:
            sequence.finish(self._unhealthy)
            return
        self._order.enter(sequence, chain(self.waiting, self.batch))
        sequence.likely_cached = self.batch.memory.cached(sequence)
        if self.disk is not None:
            self.disk.look_up(sequence)
        self.waiting.add(sequence)
        self._work.set()
        self.sleep_mode.queued()
        # Reported here: the task may be waiting for shards that hang, and would report it only after that.
        self._report.queued(len(self.waiting))

    def _check_images(self, request: PreparedRequest) -> None:
        """Raises InvalidRequest if an image is too large for a step and the model needs whole images in a step."""
        longest = max((image.length for image in request.images), default=0)
        if self._longest_image is not None and longest > self._longest_image:
            raise InvalidRequest(
                f"an image has {longest} tokens, which this model computes in one step; an image may have "
                f"{self._longest_image}"
            )

    def _check_time(self, sequence: Sequence) -> None:
        """Raises RequestTimedOut if its deadline has passed, CannotBeInTime if it would certainly miss it."""
        request = sequence.request
        if sequence.deadline <= self._clock():
            raise RequestTimedOut("the deadline of the request passed before it could be queued")
        if not (self._admission and isfinite(min(request.deadline, request.first_token_by))):
            return
        self.sleep_mode.check_time(sequence)
        running = list(self.batch)
        if self.batch.memory.chunks and self._order.gives_way(sequence, running) is not None:
            ahead, running = [], []  # it is not certain how many are preempted
        else:
            ahead = self._order.ahead_of(sequence, self.waiting)
        late = self._forecast.seconds_too_late(sequence, ahead, running, self._clock())
        if late > 0:
            raise CannotBeInTime(
                f"the server is busy: the request would be answered {late:.1f} s after its deadline "
                f"({len(self.batch)} requests run, {len(self.waiting)} wait); allow it more time, or try again later",
                retry_after=max(1, ceil(late)),
            )

    def _refuse_hopeless(self) -> None:
        """Ends waiting requests that would miss their deadlines even if they began now."""
        while (first := self.waiting.first()) is not None and not first.started and self._admission:
            others = len(self.waiting) - 1 + len(self.batch)
            if not self._forecast.is_hopeless(first, self._clock(), others):
                return
            self._forecast.missed()
            self._end(first, CannotBeInTime("the server is busy: too little time is left for the request", 1))

    def cancel(self, request_id: int) -> str:
        """Ends a request without calling its sink.

        Returns a text about its progress, for the log; empty if the id is unknown.
        """
        sequence = self.waiting.get(request_id) or self.batch.get(request_id)
        sequence = sequence or self._encoding.get(request_id) or self.early.get(request_id)
        if sequence is None:
            return ""
        progress = sequence.progress()
        if sequence.settled and self.batch.memory.caches:
            progress += "; they stay in the prefix cache"
        self._end(sequence, None)
        self._show_state()
        return progress

    async def forget(self, namespace: str) -> int:
        """Deletes everything that is cached under a namespace. Returns how many files were deleted."""
        self.early.forget(namespace)
        self.batch.memory.forget(namespace)
        return 0 if self.disk is None else await self.disk.forget(namespace)

    def expire(self) -> None:
        """Ends the waiting and running requests whose deadlines have passed."""
        now = self._clock()
        if not self._alarm.is_due(now):
            return
        for sequence in [*self._encoding, *self.waiting, *self.batch]:
            if sequence.deadline <= now:
                if sequence.started and not sequence.ends_early:
                    self._forecast.missed()
                self._end(sequence, sequence.time_up())
        self._alarm.reset(sequence.deadline for sequence in (*self._encoding, *self.waiting, *self.batch))
        self._show_state()

    def start(self) -> None:
        """Starts the task, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._alarm.start(loop)
        self._task = loop.create_task(self._run(), name="scheduler")

    async def stop(self) -> None:
        """Ends the task. Requests that have not ended fail."""
        self.sleep_mode.close()
        if self.disk is not None:
            await self.disk.stop()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._alarm.stop()
        self._adapters.close()
        self._encoding.close()
        self._unhealthy = GenerationFailed("the server is shutting down")
        self.fail_running(self._unhealthy)
        self._fail_waiting(self._unhealthy)

    async def _run(self) -> None:
        while True:
            try:
                while True:
                    await self._step()
            except RouterError as error:
                await self._recover(error)
            except Exception as error:
                logger.exception("the scheduler failed")
                await self._recover(GenerationFailed(f"the scheduler failed: {error}"))

    async def _step(self) -> None:
        """Sends all calls that can be planned, then receives the oldest response; sleeps if no call is in flight."""
        while self.send():
            pass
        self._show_state()
        if self._in_flight:
            await self.receive()
        elif len(self.batch) or (self.waiting and not (self._adapters.loading or self.sleep_mode.holds)):
            raise GenerationFailed("requests still wait for tokens, but the shards have no step to compute for them")
        else:
            await self._sleep()

    def send(self) -> list[FilterPlan | StepPlan]:
        """Plans the next call and sends it, without waiting for its response. Returns what was sent."""
        self.expire()
        self._refuse_hopeless()
        plans = self._planner.plan(self._steps_in_flight)
        for plan in plans:
            self._send(plan)
        return plans

    def _send(self, plan: FilterPlan | StepPlan) -> None:
        self._in_flight.append(_Sent(plan, self._shards.send(plan.call()), self._clock()))
        self._report.sent(plan)
        if isinstance(plan, StepPlan):
            self._steps_in_flight += 1
            for sequence in plan.joined:
                self._start(sequence)

    def _start(self, sequence: Sequence) -> bool:
        """Notifies a request's sink that it has left the queue. Returns False if the sink raised: the request ends."""
        try:
            first = sequence.start()
        except SINK_FAULTS:
            logger.exception("the start of request %d could not be handled", sequence.id)
            self._end(sequence, RouterError("the start of the generation could not be handled"))
            return False
        if first:
            self._forecast.began(sequence)
            self._order.charge(sequence, sequence.prompt_tokens - sequence.cached)
            self._report.looked_up(sequence)
        return True

    async def receive(self) -> None:
        """Waits for the response to the oldest call, and delivers its tokens. Raises GenerationFailed."""
        sent = self._in_flight[0]
        response = await sent.pending.response()
        self._in_flight.popleft()
        started, self._answered_at = max(sent.at, self._answered_at), self._clock()
        self._report.answered(sent.plan, response, self._answered_at - sent.at)
        if isinstance(sent.plan, FilterPlan):
            return
        self._steps_in_flight -= 1
        self._answered.set()
        step = sent.plan.replies, sent.plan.prompt_tokens, self._answered_at - started
        # While images are encoded, that takes up the time between steps, so their durations say nothing.
        if not (self._encoding.running and self._pace.measured):
            self._pace.observe(*step)
        self._forecast.observe(*step, self._answered_at)
        self._deliver(response.step)

    def _deliver(self, step: pb.StepResponse) -> None:
        """Delivers the tokens of a step to their sequences, and ends the requests that end with them."""
        self.batch.answered += 1
        for generation in step.generations:
            sequence = self.batch.get(generation.request_id)
            if sequence is None:
                continue  # its client has left meanwhile
            self._order.charge(sequence, len(generation.token_ids))
            try:
                outcome = sequence.advance(generation)
            except Exception:
                logger.exception("the tokens of request %d could not be processed", sequence.id)
                self._drop_broken(sequence)
                continue
            if outcome is not None:
                if isinstance(outcome, FinishReason):
                    self._forecast.ended(sequence)
                self._end(sequence, outcome, dropped_by_shards=bool(generation.finish_reason))
            elif self.disk is not None and sequence.generated == sequence.newest:
                self.disk.computed(sequence)  # its prompt: the answer may take minutes

    def _end(self, sequence: Sequence, outcome: Outcome | None, *, dropped_by_shards: bool = False) -> None:
        """Ends a request that waits or runs. Every request ends here. outcome: None if its client has disconnected."""
        self.early.leave(sequence)
        self._encoding.leave(sequence)
        self.waiting.leave(sequence)
        self.batch.leave(sequence, dropped_by_shards=dropped_by_shards)
        if self.disk is not None:
            self.disk.computed(sequence)
        if isinstance(outcome, FinishReason):
            self.batch.memory.keep(sequence)
        sequence.finish(outcome)

    def _drop_broken(self, sequence: Sequence) -> None:
        """Ends a request whose planning has raised an exception, so that its state may be inconsistent."""
        self.batch.disown(sequence)
        self._end(sequence, GenerationFailed("the request could not be scheduled"))

    async def _sleep(self) -> None:
        """Waits for requests. Checks the block allocator once if none come for some time."""
        self._work.clear()
        if self._unchecked and not await self._work_within(self._idle_check_after_s):
            self._check_blocks()
        await self._work.wait()
        self._unchecked = True
        await asyncio.sleep(0)  # requests that come together are admitted together

    async def _work_within(self, seconds: float) -> bool:
        """Returns False if no work comes within this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # Python 3.11's wait_for ignores a cancellation just after the work
                await self._work.wait()
        return self._work.is_set()

    def _check_blocks(self) -> None:
        """Checks the block allocator and the prefix cache, and rebuilds them if they are inconsistent."""
        self._unchecked = False
        try:
            self.batch.check()
        except AssertionError:
            logger.exception("the KV block allocator is inconsistent; it is rebuilt, without the prefix cache")
            self.batch.memory.rebuild(self.batch)

    def _show_state(self) -> None:
        self._report.state(self.waiting, self.batch, self._adapters)

    async def _recover(self, error: RouterError) -> None:
        """Fails the batch. Returns when the shards have dropped it and are healthy; until then all requests fail."""
        logger.error("a batch of %d requests failed: %s", len(self.batch), error)
        self.fail_running(error if isinstance(error, GenerationFailed) else GenerationFailed(str(error)))
        while True:
            try:
                await self._shards.send(calls.clear_call(), self._recovery_timeout_s).response()
                await self._shards.health(self._recovery_timeout_s)
            except RouterError as still:
                if self._unhealthy is None:
                    logger.error("the shards do not recover; requests fail until they do, or are restarted: %s", still)
                self._unhealthy = GenerationFailed(str(still))
                self._fail_waiting(self._unhealthy)
                await asyncio.sleep(self._recovery_interval_s)
            else:
                if self._unhealthy is not None:
                    logger.info("the shards have recovered")
                self._unhealthy = None
                return

    def fail_running(self, error: RouterError) -> None:
        """Cancels all calls in flight and fails the batch: the shards have lost it, and all cached prefixes with it."""
        for sent in self._in_flight:
            sent.pending.cancel()
        self._in_flight.clear()
        self._steps_in_flight = 0
        lost = list(self.batch)
        self.batch.reset()
        for sequence in lost:
            self._end(sequence, error)
        self._show_state()

    def _fail_adapter(self, adapter: Adapter, error: RouterError) -> None:
        """Fails the requests that wait for an adapter that cannot be loaded."""
        for sequence in [sequence for sequence in self.waiting if sequence.adapter is adapter]:
            self._end(sequence, GenerationFailed(f"the adapter {adapter.id!r} could not be loaded: {error}"))
        self._show_state()

    def _fail_waiting(self, error: RouterError) -> None:
        for sequence in [*self._encoding, *self.waiting]:
            self._end(sequence, error)
        self._show_state()
