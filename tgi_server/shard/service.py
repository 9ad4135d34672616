"""The gRPC service around one engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import torch

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import TextGenerationServiceServicer
from tgi_server.engine import Engine
from tgi_server.engine.engine import Step
from tgi_server.engine.errors import InvalidCall, NotEnoughMemory
from tgi_server.shard import conversion
from tgi_server.shard.call_order import CallOrder, OutOfTurn
from tgi_server.shard.compilation import Compilation
from tgi_server.shard.tracing import RequestSpans

logger = logging.getLogger(__name__)


class TextGenerationService(TextGenerationServiceServicer):
    """Calls run on the event loop itself, one at a time, in the order in which the router numbered them; but grammars
    are compiled in threads.

    Nothing else has to run on that loop while a step computes, so a thread of its own for the engine would only add
    hand-overs. On a GPU a step is collected after the loop had one turn, in which the next call can start its step.
    """

    def __init__(
        self,
        engine: Engine,
        model_id: str,
        revision: str | None,
        urls: list[str],
        on_fatal: Callable[[], None],
        spans: RequestSpans | None = None,
    ) -> None:
        """urls: the sockets of all shards, in rank order. on_fatal: called when the device can compute no more.

        spans: of the requests, when somebody collects them.
        """
        self._engine = engine
        self._info = conversion.info(engine.info, model_id, revision, world_size=len(urls))
        self._urls = urls
        self._on_fatal = on_fatal
        self._spans = spans
        self._order = CallOrder()
        self._collecting = asyncio.Lock()
        self._compilation = Compilation(engine.grammars) if engine.grammars is not None else None
        self._overlap = engine.info.device_type == "cuda"

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.InfoResponse:
        return self._info

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self._urls)

    async def Health(self, request: pb.HealthRequest, context: grpc.aio.ServicerContext) -> pb.HealthResponse:
        async with self._errors(context):
            self._engine.check_device()
        return pb.HealthResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: grpc.aio.ServicerContext) -> pb.WarmupResponse:
        async with self._errors(context):
            capacity = self._engine.warm_up(
                max_batch_size=request.max_batch_size,
                max_prefill_tokens=request.max_prefill_tokens,
                max_total_tokens=request.max_total_tokens if request.HasField("max_total_tokens") else None,
            )
        if self._compilation is not None:
            self._compilation.prepare()
        return conversion.capacity(capacity)

    async def Compile(self, request: pb.CompileRequest, context: grpc.aio.ServicerContext) -> pb.CompileResponse:
        if self._compilation is None:
            return pb.CompileResponse(error="the model's folder has no tokenizer")
        return pb.CompileResponse(error=await self._compilation.fault(conversion.grammar(request.grammar)) or "")

    async def Prefill(self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext) -> pb.StepResponse:
        async with self._errors(context):
            await self._order.turn(request.sequence)
            if self._spans is not None:
                self._spans.joining(request.requests)
            step = self._engine.prefill(
                request.batch_id,
                joining=[conversion.sequence(joining) for joining in request.requests],
                chunks=[(chunk.request_id, chunk.tokens) for chunk in request.chunks],
                grants=conversion.grants(request.grants),
                decode=request.decode,
            )
            return await self._collect(step)

    async def Decode(self, request: pb.DecodeRequest, context: grpc.aio.ServicerContext) -> pb.StepResponse:
        async with self._errors(context):
            await self._order.turn(request.sequence)
            return await self._collect(self._engine.decode(request.batch_id, conversion.grants(request.grants)))

    async def FilterBatch(
        self, request: pb.FilterBatchRequest, context: grpc.aio.ServicerContext
    ) -> pb.FilterBatchResponse:
        async with self._errors(context):
            await self._order.turn(request.sequence)
            self._engine.keep(request.batch_id, request.keep_request_ids)
        self._end_spans()
        return pb.FilterBatchResponse(batch=conversion.cached_batch(self._engine.batch))

    async def ClearCache(
        self, request: pb.ClearCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.ClearCacheResponse:
        async with self._errors(context):
            if request.HasField("batch_id"):
                await self._order.turn(request.sequence)
                self._engine.clear(request.batch_id)
            else:
                self._order.restart(request.sequence)
                self._engine.clear(None)
        self._end_spans()
        return pb.ClearCacheResponse()

    async def _collect(self, step: Step) -> pb.StepResponse:
        size = len(self._engine.batch or ())
        if self._overlap:
            await asyncio.sleep(0)
        async with self._collecting:
            result = step.collect()
        if self._spans is not None:
            self._spans.stepped(result.generations, size)
        return conversion.step_response(result, self._engine.batch)

    @asynccontextmanager
    async def _errors(self, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        """Answers an engine's error with a status; the service goes on, unless the device itself is lost."""
        try:
            yield
        except (InvalidCall, OutOfTurn) as error:
            await self._refuse(context, grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except NotEnoughMemory as error:
            await self._refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except torch.cuda.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            logger.error("out of device memory in a step; the batch is dropped: %s", error)
            await self._refuse(
                context, grpc.StatusCode.RESOURCE_EXHAUSTED, "out of device memory; the batch was dropped"
            )
        except RuntimeError as error:
            logger.exception("a step failed; the batch is dropped")
            if self._device_is_lost():
                logger.critical("the device computes no more; this shard ends")
                self._on_fatal()
            await self._refuse(context, grpc.StatusCode.INTERNAL, str(error).splitlines()[0])

    async def _refuse(self, context: grpc.aio.ServicerContext, status: grpc.StatusCode, reason: str) -> None:
        self._end_spans(reason)
        await context.abort(status, reason)

    def _end_spans(self, error: str | None = None) -> None:
        """Of the requests that have left the batch. error: why they did, unless the router wanted it."""
        if self._spans is not None:
            batch = self._engine.batch
            self._spans.keep(batch.request_ids() if batch is not None else (), error)

    def _device_is_lost(self) -> bool:
        """A CUDA error may poison the process's context: nothing computes after it, whatever is asked."""
        try:
            self._engine.check_device()
        except RuntimeError:
            return True
        return False
