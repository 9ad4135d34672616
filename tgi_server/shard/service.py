"""The gRPC service around one engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import clear_frames

import grpc
import torch

from shared.logging import one_line
from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import TextGenerationServiceServicer
from tgi_server.engine import Engine
from tgi_server.engine.errors import EngineError, InvalidAdapter, InvalidCall, InvalidImage, NotEnoughMemory, PeerLost
from tgi_server.grammar import GrammarError
from tgi_server.shard import conversion
from tgi_server.shard.call_stream import CallStream
from tgi_server.shard.encoder_queue import EncoderQueue
from tgi_server.shard.encoder_service import encode
from tgi_server.shard.grammar_queue import GrammarQueue
from tgi_server.shard.prefix_service import PrefixService
from tgi_server.shard.sleep_calls import SleepCalls
from tgi_server.shard.tracing import RequestSpans
from tgi_server.wire import image_from_message, shares_memory

logger = logging.getLogger(__name__)

# Characters of a status's message. Each may take 12 bytes, as gRPC escapes it, and 8 KiB of metadata surely arrive.
_LONGEST_REASON = 600
# In the message of the RuntimeError that torch raises when the system gives no memory.
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


@dataclass(frozen=True, slots=True)
class Place:
    """The address of a shard, in gRPC's spelling. grammar_url: the address of its GrammarService."""

    url: str
    grammar_url: str


class TextGenerationService(TextGenerationServiceServicer):
    """Runs the router's calls on the event loop itself, one at a time.

    Nothing else has to run on that loop while a step computes, so a thread of its own for the engine would only add
    hand-overs.
    """

    def __init__(
        self,
        engine: Engine,
        model_id: str,
        revision: str | None,
        places: Sequence[Place],
        grammars: GrammarQueue | None,
        sleep: SleepCalls,
        on_fatal: Callable[[], None],
        spans: RequestSpans | None = None,
        encoders: EncoderQueue | None = None,
        encoder_infos: Sequence[pb.Encoder] = (),
    ) -> None:
        """places: the addresses of all shards, in rank order. grammars: None if the model has no tokenizer. sleep: of
        the models. on_fatal: called when the device can compute no more. spans: None if no traces are collected.
        encoders: of the embedding and rerank models, and of images; None: there are none. encoder_infos: their
        descriptions for the router.
        """
        self._engine = engine
        self._info = conversion.info(engine.info, model_id, revision, world_size=len(places))
        self._info.encoders.extend(encoder_infos)
        self._encoders = encoders
        self._places = places
        self._grammars = grammars
        self._sleep = sleep
        self._on_fatal = on_fatal
        self._spans = spans
        self._running: CallStream | None = None
        self._prefixes = PrefixService(engine)
        # Reads adapters beside the steps, in one thread of torch's: more would take cores from the steps.
        self._reader = ThreadPoolExecutor(1, "adapters", initializer=partial(torch.set_num_threads, 1))

    async def Info(self, request: pb.InfoRequest, context: grpc.aio.ServicerContext) -> pb.InfoResponse:
        self._info.run_is_open = self._running is not None
        self._info.running_sequences = len(self._engine.batch or ())
        self._info.shares_memory = shares_memory(request.probe)
        return self._info

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(
            urls=[place.url for place in self._places], grammar_urls=[place.grammar_url for place in self._places]
        )

    async def Health(self, request: pb.HealthRequest, context: grpc.aio.ServicerContext) -> pb.HealthResponse:
        async with self._errors(context):
            self._engine.check_device()
        return pb.HealthResponse()

    async def Warmup(self, request: pb.WarmupRequest, context: grpc.aio.ServicerContext) -> pb.WarmupResponse:
        async with self._errors(context):
            await self._sleep.wake()  # another router may have put it to sleep
            capacity = self._engine.warm_up(
                max_batch_size=request.max_batch_size or None,
                max_prefill_tokens=request.max_prefill_tokens or None,
                max_total_tokens=request.max_total_tokens or None,
                max_batch_total_tokens=request.max_batch_total_tokens or None,
                adapter_bytes=request.adapter_bytes,
            )
        if self._grammars is not None:
            self._grammars.start()  # reads the tokenizer for seconds; requests with grammars wait for that
        response = conversion.capacity(capacity, self._engine.fallbacks)
        self._info.limits.CopyFrom(request)
        self._info.capacity.CopyFrom(response)
        return response

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.LoadAdapterResponse:
        async with self._errors(context, reading=request.folder):
            self._sleep.check_awake()  # adapters are combined with the weights
            fetch = partial(self._engine.adapters.fetch, request.adapter_id, Path(request.folder))
            adapter = await asyncio.get_running_loop().run_in_executor(self._reader, fetch)
            if not request.check_only:
                self._engine.adapters.put(request.adapter_id, adapter)
        return pb.LoadAdapterResponse(rank=adapter.rank, bytes=adapter.nbytes)

    async def UnloadAdapter(
        self, request: pb.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.UnloadAdapterResponse:
        self._engine.adapters.drop(request.adapter_id)
        return pb.UnloadAdapterResponse()

    async def Encode(self, request: pb.EncodeRequest, context: grpc.aio.ServicerContext) -> pb.EncodeResponse:
        async with self._errors(context):
            self._sleep.check_awake()
            return await encode(self._encoders, request, context)
        raise AssertionError  # an error has ended the call

    async def EncodeImages(
        self, request: pb.EncodeImagesRequest, context: grpc.aio.ServicerContext
    ) -> pb.EncodeImagesResponse:
        async with self._errors(context):
            self._sleep.check_awake()
            tower = self._engine.tower
            if tower is None or self._encoders is None:
                raise InvalidCall(self._engine.info.no_images or "the model does not read images")
            for image in request.images:
                encode = partial(tower.encode, image_from_message(image))
                await self._encoders.run(encode, request.target_gap_ms / 1000 or None)
        return pb.EncodeImagesResponse()

    async def DescribeFiles(
        self, request: pb.DescribeFilesRequest, context: grpc.aio.ServicerContext
    ) -> pb.DescribeFilesResponse:
        async with self._errors(context):
            return self._prefixes.describe()
        raise AssertionError  # an error has ended the call

    async def StoreFile(self, request: pb.PrefixFile, context: grpc.aio.ServicerContext) -> pb.StoreFileResponse:
        async with self._errors(context):
            return pb.StoreFileResponse(bytes=await self._prefixes.store(request))
        raise AssertionError  # an error has ended the call

    async def LoadFile(self, request: pb.PrefixFile, context: grpc.aio.ServicerContext) -> pb.LoadFileResponse:
        async with self._errors(context):
            size, seconds = await self._prefixes.load(request)
            return pb.LoadFileResponse(bytes=size, read_ns=int(seconds * 1e9))
        raise AssertionError  # an error has ended the call

    async def Sleep(self, request: pb.SleepRequest, context: grpc.aio.ServicerContext) -> pb.SleepResponse:
        async with self._errors(context):
            return await self._sleep.sleep(request)
        raise AssertionError  # an error has ended the call

    async def Wake(self, request: pb.WakeRequest, context: grpc.aio.ServicerContext) -> pb.WakeResponse:
        async with self._errors(context):
            return await self._sleep.wake()
        raise AssertionError  # an error has ended the call

    async def Run(self, calls: AsyncIterator[pb.Call], context: grpc.aio.ServicerContext) -> AsyncIterator[pb.Answer]:
        """Runs the calls of one stream. A stream that is opened ends the one before it."""
        self.end_run("another stream has replaced this one")
        turns = self._encoders.turns if self._encoders else None
        self._running = running = CallStream(self._engine, self._spans, turns, alone=len(self._places) == 1)
        try:
            async with aclosing(running.answers(calls)) as answers:
                async for answer in answers:
                    yield answer
        except Exception as error:
            _, reason = self._explain(error)
            running.end(reason)
            yield pb.Answer(failure=pb.Failure(reason=reason))
            # The router closes the stream: if the shard did, the reason might get lost.
            await asyncio.Event().wait()
        finally:
            running.end(None)
            if self._running is running:
                self._running = None

    def end_run(self, reason: str) -> None:
        """Ends the stream that is open, if there is one, and forgets its batch. reason: what its router receives."""
        if self._running is not None:
            self._running.end(reason)

    @asynccontextmanager
    async def _errors(self, context: grpc.aio.ServicerContext, reading: str = "") -> AsyncIterator[None]:
        """Turns an engine's error into a gRPC status; the service continues, unless the device itself is lost.

        reading: the adapter that is read, if the call is for one.
        """
        try:
            yield
        except Exception as error:
            status, reason = self._explain(error, reading)
            await context.abort(status, one_line(reason, _LONGEST_REASON))

    def _explain(self, error: Exception, reading: str = "") -> tuple[grpc.StatusCode, str]:
        """Returns status and message for the router, and logs what an operator has to know.

        Ends the process when there is no memory even for that: what else runs in it may stand still for ever.
        """
        clear_frames(error.__traceback__)  # they hold what the step has allocated
        try:
            return self._status(error, reading)
        except MemoryError:
            self._on_fatal()
            raise

    def _status(self, error: Exception, reading: str) -> tuple[grpc.StatusCode, str]:
        if isinstance(error, InvalidCall | InvalidAdapter):
            return grpc.StatusCode.FAILED_PRECONDITION, str(error)
        if isinstance(error, InvalidImage):
            return grpc.StatusCode.INVALID_ARGUMENT, str(error)
        if isinstance(error, NotEnoughMemory | GrammarError):
            return grpc.StatusCode.RESOURCE_EXHAUSTED, str(error)
        if isinstance(error, EngineError):
            # What the model's own folder lacks is no fault of a request.
            logger.error("%s", error)
            return grpc.StatusCode.INTERNAL, str(error)
        status, reason = grpc.StatusCode.INTERNAL, (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, torch.cuda.OutOfMemoryError):
            torch.cuda.empty_cache()
            logger.error(
                "a step ran out of device memory; lower --cuda-memory-fraction. Its batch is dropped: %s", error
            )
            status = grpc.StatusCode.RESOURCE_EXHAUSTED
            reason = "a step ran out of device memory, and its batch was dropped"
        elif isinstance(error, MemoryError) or _CPU_ALLOCATOR in str(error):
            logger.error("out of memory: the batch or adapter is dropped; lower --cpu-memory: %s", error)
            status, reason = grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory: the batch or adapter was dropped"
        elif reading:
            logger.error("the adapter %s cannot be read", reading, exc_info=error)
        elif isinstance(error, PeerLost):
            logger.error("a step failed because of another shard; the batch is dropped: %s", error)
        else:
            logger.error("a step failed; the batch is dropped", exc_info=error)
        if (fault := self._device_fault()) is not None:
            logger.critical("the device has failed, or the other shards wait in vain, so this shard ends: %s", fault)
            self._on_fatal()
        elif reading and status is grpc.StatusCode.INTERNAL:
            return grpc.StatusCode.FAILED_PRECONDITION, f"{reading} cannot be read: {type(error).__name__}: {error}"
        return status, reason

    def _device_fault(self) -> str | None:
        """Returns why nothing can be computed any more, in words; None if it can.

        A CUDA error may poison the process's context, and shards may be out of step.
        """
        try:
            self._engine.check_device()
        except RuntimeError as error:
            return one_line(str(error), _LONGEST_REASON)
        return None
