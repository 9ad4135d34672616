"""The shard's end of the stream on which the router sends calls."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import nullcontext

from shared.stubs import generate_pb2 as pb
from tgi_server.engine import Engine, Step
from tgi_server.engine.errors import InvalidCall
from tgi_server.shard import conversion
from tgi_server.shard.tracing import RequestSpans
from tgi_server.shard.turns import Turns

# A call that was started: a step whose result has to be collected, an answer, or the call's error. None: the end of the
# stream.
Started = Step | pb.Answer | Exception | None


class CallStream:
    """Starts each call as soon as it arrives, and answers the calls in order.

    On a GPU the next step is started while the device still computes the current one; on a CPU a step has ended when
    it has been started.
    """

    def __init__(
        self, engine: Engine, spans: RequestSpans | None, turns: Turns | None = None, *, alone: bool = True
    ) -> None:
        """spans: None if no traces are collected. turns: shared with the thread of the encoders; None: there is none.

        alone: True if no other shard computes the same steps: sequences are then dropped as soon as they end.
        """
        self._engine = engine
        self._spans = spans
        self._turn = turns.step if turns is not None else nullcontext
        self._started: asyncio.Queue[Started] = asyncio.Queue()
        self._ended = False
        self._alone = alone
        self._calls = 0
        self._unseen: deque[tuple[int, Step]] = deque()  # call number and step, until all shards have answered it
        self._device_is_ahead = engine.info.device_type == "cuda"

    async def answers(self, calls: AsyncIterator[pb.Call]) -> AsyncGenerator[pb.Answer]:
        """Yields the answers in order. Raises the error of a call that fails; later calls are not executed."""
        starting = asyncio.create_task(self._start_all(calls))
        try:
            while (started := await self._started.get()) is not None:
                yield await self._answer(started)
        finally:
            starting.cancel()

    def end(self, reason: str | None) -> None:
        """Ends the stream: no further call is executed, and the engine drops the batch.

        reason: a message that `answers` raises as an InvalidCall and the spans report; None: the router ended it.
        """
        if not self._ended:
            self._ended = True
            self._engine.clear()
            self._end_spans(reason)
            self._started.put_nowait(None if reason is None else InvalidCall(reason))

    async def _start_all(self, calls: AsyncIterator[pb.Call]) -> None:
        try:
            async for call in calls:
                if not self._ended:
                    self._started.put_nowait(self._start(call))
            self._started.put_nowait(None)
        except Exception as error:
            self._started.put_nowait(error)

    def _start(self, call: pb.Call) -> Step | pb.Answer:
        self._calls += 1
        while self._unseen and self._unseen[0][0] <= call.answered:
            self._unseen.popleft()[1].retire()
        with self._turn():
            started = self._execute(call)
        if isinstance(started, Step) and not self._alone:
            self._unseen.append((self._calls, started))
        return started

    def _execute(self, call: pb.Call) -> Step | pb.Answer:
        kind = call.WhichOneof("call")
        if kind == "decode":
            decode = call.decode
            return self._engine.step(
                decode.batch_id,
                grants=conversion.grants(decode.grants),
                saves=conversion.saves(decode.saves),
                closing=list(decode.closing),
            )
        if kind == "prefill":
            return self._prefill(call.prefill)
        if kind == "filter_batch":
            self._engine.keep(call.filter_batch.batch_id, call.filter_batch.keep_request_ids)
            self._end_spans()
            return pb.Answer(filter_batch=pb.FilterBatchResponse())
        request = call.clear_cache
        self._engine.clear(request.batch_id if request.HasField("batch_id") else None)
        self._end_spans()
        return pb.Answer(clear_cache=pb.ClearCacheResponse())

    def _prefill(self, request: pb.PrefillRequest) -> Step:
        if self._spans is not None:
            self._spans.joining(request.requests)
        return self._engine.step(
            request.batch_id,
            joining=[conversion.sequence(joining) for joining in request.requests],
            chunks=[(chunk.request_id, chunk.tokens) for chunk in request.chunks],
            grants=conversion.grants(request.grants),
            saves=conversion.saves(request.saves),
            decode=request.decode,
            closing=list(request.closing),
        )

    async def _answer(self, started: Step | pb.Answer | Exception) -> pb.Answer:
        if isinstance(started, Exception):
            raise started
        if not isinstance(started, Step):
            return started
        if self._device_is_ahead:
            await asyncio.to_thread(started.synchronize)
        result = started.collect() if self._alone else started.result()
        if self._spans is not None:
            self._spans.stepped(result.generations, started.batch_size)
        return pb.Answer(step=conversion.step_response(result))

    def _end_spans(self, error: str | None = None) -> None:
        """Ends the spans of requests that have left the batch. error: the reason; None: the router removed them."""
        if self._spans is not None:
            batch = self._engine.batch
            self._spans.keep(batch.request_ids() if batch is not None else (), error)
