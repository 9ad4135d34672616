"""The one task that owns all batching state and drives the shards."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from shared.stubs import generate_pb2 as pb
from tgi_server.router.errors import GenerationFailed, InvalidRequest, RouterError
from tgi_server.router.metrics import ConcatReason, Method, Metrics
from tgi_server.router.request import ValidRequest
from tgi_server.router.scheduling.admission import AdmissionPolicy, Reason
from tgi_server.router.scheduling.batch import Batch
from tgi_server.router.scheduling.delivery import Delivery, tell_failure
from tgi_server.router.scheduling.memory import Memory
from tgi_server.router.scheduling.padded_memory import PaddedMemory
from tgi_server.router.scheduling.paged_memory import PagedMemory
from tgi_server.router.scheduling.planner import Call, Planner
from tgi_server.router.scheduling.queue import WaitingQueue
from tgi_server.router.scheduling.sequence import Sequence
from tgi_server.router.scheduling.settings import SchedulerSettings
from tgi_server.router.shard_client import PendingAnswer, ShardedClient

logger = logging.getLogger(__name__)

_CONCAT = {
    Reason.ROOM: ConcatReason.CHUNKING,
    Reason.BACKPRESSURE: ConcatReason.BACKPRESSURE,
    Reason.WAIT_EXCEEDED: ConcatReason.WAIT_EXCEEDED,
}


@dataclass(slots=True)
class _Sent:
    """A call on its way."""

    call: Call
    pending: PendingAnswer[Any]
    method: Method
    at: float


class Scheduler:
    """Takes requests from the API (`request.Submitter`), and pushes their tokens into their sinks.

    While nothing is left to do its task sleeps. When a call fails, all requests in the batch fail with
    GenerationFailed; once the shards have shown that they are well, it goes on with those that wait.
    """

    def __init__(
        self,
        shards: ShardedClient,
        info: pb.InfoResponse,
        capacity: pb.WarmupResponse,
        settings: SchedulerSettings,
        metrics: Metrics,
    ) -> None:
        """info, capacity: what the shards answered to Info and Warmup."""
        self._shards = shards
        self._settings = settings
        self._metrics = metrics
        self._metrics.batches.kv_capacity(capacity.max_batch_total_tokens)
        self._queue = WaitingQueue()
        self._memory: Memory = (
            PagedMemory(capacity.num_blocks, info.block_size, prefix_cache=settings.prefix_cache)
            if info.paged
            else PaddedMemory(settings.max_batch_total_tokens)
        )
        self._batch = Batch(self._memory.block_size)
        self._delivery = Delivery(self._queue, self._batch, self._memory)
        self._planner = Planner(
            self._queue,
            self._batch,
            self._memory,
            AdmissionPolicy.of(settings),
            settings.pipeline_depth,
            self._delivery.fault,
        )
        self._in_flight: deque[_Sent] = deque()
        self._steps_in_flight = 0
        self._work = asyncio.Event()
        self._answered = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unhealthy: RouterError | None = None
        self._unchecked = True  # something may have run since the books were checked last

    @property
    def healthy(self) -> bool:
        """Whether the shards were well when they were last heard of."""
        return self._unhealthy is None

    async def next_answer(self) -> None:
        """Returns when the shards have answered a step."""
        self._answered.clear()
        await self._answered.wait()

    def submit(self, request: ValidRequest) -> None:
        """Queues the request; fails it at once when the shards are not there, or could never take or hold it."""
        if self._unhealthy is not None:
            tell_failure(request, self._unhealthy)
            return
        try:
            sequence = Sequence(request)
            self._memory.check_length(sequence)
        except InvalidRequest as error:
            tell_failure(request, error)
        else:
            self._queue.add(sequence)
            self._work.set()

    def cancel(self, request_id: int) -> None:
        """Forgets the request; its sink hears nothing more. Unknown ids are ignored."""
        if self._queue.cancel(request_id):
            return
        sequence = self._batch.get(request_id)
        if sequence is not None:
            self._delivery.drop(sequence)
            self._show_state()

    def start(self) -> None:
        """Starts the task, on the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="scheduler")

    async def stop(self) -> None:
        """Ends the task; whatever has not ended fails."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._unhealthy = GenerationFailed("the server is shutting down")
        self._drop_everything(self._unhealthy)

    def check(self) -> None:
        """Compares the books of blocks with what sequences and prefix cache hold. Raises AssertionError."""
        self._memory.check(self._batch)

    async def _run(self) -> None:
        while True:
            try:
                await self._serve()
            except RouterError as error:
                await self._recover(error)
            except Exception as error:
                logger.exception("the scheduler failed")
                await self._recover(GenerationFailed(f"the scheduler failed: {error}"))

    async def _serve(self) -> None:
        while True:
            self._send_calls()
            self._show_state()
            if self._in_flight:
                await self._receive()
            else:
                await self._sleep()

    async def _sleep(self) -> None:
        if len(self._batch) or len(self._queue):
            raise GenerationFailed("the shards owe tokens to requests that they do not know any more")
        self._work.clear()
        if self._unchecked and not await self._work_within(self._settings.idle_check_after_s):
            self._check_books()
        await self._work.wait()
        self._unchecked = True
        await asyncio.sleep(0)  # requests that come together are admitted together

    async def _work_within(self, seconds: float) -> bool:
        """Returns False if there is still nothing to do after so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._work.wait(), seconds)
        return self._work.is_set()

    def _check_books(self) -> None:
        """Looks for blocks that nobody holds or that are held wrongly. Nobody waits for it, and no more than once."""
        self._unchecked = False
        try:
            self.check()
        except AssertionError:
            logger.exception("the books of the KV blocks are wrong; they are made anew, without the prefix cache")
            self._memory.rebuild(self._batch)

    def _send_calls(self) -> None:
        while call := self._planner.next_call(self._steps_in_flight):
            message = call.message
            pending: PendingAnswer[Any]
            if isinstance(message, pb.DecodeRequest):
                method, pending = Method.DECODE, self._shards.decode(message)
            elif isinstance(message, pb.PrefillRequest):
                method, pending = Method.PREFILL, self._shards.prefill(message)
            else:
                method, pending = Method.DECODE, self._shards.filter_batch(message)
            self._in_flight.append(_Sent(call, pending, method, perf_counter()))
            if call.is_step:
                self._steps_in_flight += 1
                self._metrics.batches.called(method)
            if call.joined:
                self._announce(call)
            if call.preempted:
                self._metrics.batches.preempted(call.preempted)

    def _announce(self, call: Call) -> None:
        self._metrics.batches.admitted(len(call.joined), _CONCAT[call.concat] if call.concat else None)
        for sequence in call.joined:
            if not sequence.started:
                self._metrics.requests.skipped(sequence.cached)
                self._metrics.batches.looked_up(len(sequence.request.input_ids), sequence.cached)
                self._delivery.started(sequence)

    async def _receive(self) -> None:
        sent = self._in_flight[0]
        answer = await sent.pending.answer()
        self._in_flight.popleft()
        seconds = perf_counter() - sent.at
        if not sent.call.is_step:
            self._metrics.batches.filtered(sent.method, seconds)
            return
        self._steps_in_flight -= 1
        self._answered.set()
        timings = answer.timings
        self._metrics.batches.answered(sent.method, seconds, timings.forward_ns / 1e9, timings.sampling_ns / 1e9)
        self._delivery.deliver(answer)

    def _show_state(self) -> None:
        batches = self._metrics.batches
        batches.queue_size(len(self._queue))
        batches.current(len(self._batch), self._memory.held_tokens)
        batches.kv_cached(self._memory.cached_tokens)

    async def _recover(self, error: RouterError) -> None:
        """Fails the batch. Returns when the shards have forgotten it and compute; until then all requests fail."""
        logger.error("a batch of %d requests failed: %s", len(self._batch), error)
        failure = error if isinstance(error, GenerationFailed) else GenerationFailed(str(error))
        self._abandon(failure)
        while True:
            try:
                timeout = self._settings.recovery_timeout_s
                await self._shards.clear_cache(pb.ClearCacheRequest(), timeout).answer()
                await self._shards.health(timeout)
            except RouterError as still:
                if self._unhealthy is None:
                    logger.error("the shards do not recover, so requests fail from now on: %s", still)
                self._unhealthy = GenerationFailed(str(still))
                self._fail(self._queue.take_all(), self._unhealthy)
                self._show_state()
                await asyncio.sleep(self._settings.recovery_interval_s)
            else:
                if self._unhealthy is not None:
                    logger.info("the shards have recovered")
                self._unhealthy = None
                return

    def _abandon(self, error: RouterError) -> None:
        """Waits for no call any more, and fails the batch."""
        for sent in self._in_flight:
            sent.pending.cancel()
        self._in_flight.clear()
        self._steps_in_flight = 0
        self._planner.reset()
        self._delivery.fail_all(error)
        self._show_state()

    def _drop_everything(self, error: RouterError) -> None:
        self._abandon(error)
        self._fail(self._queue.take_all(), error)
        self._show_state()

    def _fail(self, sequences: Iterable[Sequence], error: RouterError) -> None:
        for sequence in sequences:
            tell_failure(sequence.request, error)
