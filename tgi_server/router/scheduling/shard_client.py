"""The router's end of its contract with the shards (proto/generate.proto)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import grpc

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import GrammarServiceStub, TextGenerationServiceStub
from tgi_server.contract import Image
from tgi_server.router.errors import CannotSleep, GenerationFailed, InvalidRequest, Overloaded, Unhealthy
from tgi_server.shared_bytes import SharedBytes, SharedMemory
from tgi_server.wire import image_to_message, shared_to_message

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    # A shard that cannot be reached yet may be reachable any moment.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
    # Detects a frozen process or a lost machine while waiting for an answer: gRPC's own threads respond to pings
    # whatever the shard computes.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
]
# Seconds after which a process that does not accept a connection counts as frozen.
_CONNECT_SECONDS = 2.0

Response = TypeVar("Response")


class ShardClient:
    """Channels to one shard, and its methods.

    stub: stub of its TextGenerationService. grammar_stub: stub of its GrammarService.
    """

    def __init__(self, url: str, rank: int, grammar_url: str | None = None) -> None:
        """url: gRPC target, unix:///path or ipv4:ADDRESS:PORT. grammar_url: target of the GrammarService, if known."""
        self.rank = rank
        self._url = url
        self._released: list[int] = []
        self._channels = [grpc.aio.insecure_channel(url, options=_CHANNEL_OPTIONS)]
        self.stub = TextGenerationServiceStub(self._channels[0])
        if grammar_url is not None:
            self._channels.append(grpc.aio.insecure_channel(grammar_url, options=_CHANNEL_OPTIONS))
            self.grammar_stub = GrammarServiceStub(self._channels[1])

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def connects(self) -> bool:
        """Returns False if the process is frozen or gone. A busy one accepts connections in gRPC's threads."""
        async with grpc.aio.insecure_channel(self._url, options=_CHANNEL_OPTIONS) as channel:
            with suppress(TimeoutError):
                await asyncio.wait_for(channel.channel_ready(), _CONNECT_SECONDS)
                return True
        return False

    async def siblings(self, timeout_s: float) -> list[tuple[str, str]]:
        """Waits until this shard listens. Returns both services' addresses of all shards, by rank. Raises Unhealthy."""
        try:
            found: pb.ServiceDiscoveryResponse = await self.stub.ServiceDiscovery(
                pb.ServiceDiscoveryRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise self.explain(error) from error
        return list(zip(found.urls, found.grammar_urls, strict=True))

    async def compile(
        self, grammar: pb.Grammar, pin: int, client: str, tried: pb.CompileResponse | None, timeout_s: float
    ) -> pb.CompileResponse:
        """Has the shard compile a grammar, and keep it until `pin` is released.

        client: name for fair scheduling. tried: response of another shard, whose result is used; None: it is tried
        here. Raises Overloaded, and errors of gRPC.
        """
        released, self._released = self._released, []
        request = pb.CompileRequest(grammar=grammar, pin=pin, released=released, client=client)
        if tried is not None:
            request.size, request.leniency = tried.size, tried.leniency
        try:
            response: pb.CompileResponse = await self.grammar_stub.Compile(request, timeout=timeout_s)
        except BaseException as error:
            self._released += released  # it is not known if the shard has received them
            if isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Overloaded(f"the grammar cannot be compiled now: {error.details()}") from error
            raise
        return response

    def release(self, pin: int) -> None:
        """Releases a grammar. The shard is told with the next one to compile, as it needs the memory only then."""
        self._released.append(pin)

    def explain(self, error: grpc.aio.AioRpcError) -> Unhealthy:
        """Returns the error as one line for the client and the log."""
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            return Unhealthy(f"shard {self.rank} cannot be reached")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unhealthy(f"shard {self.rank} did not answer in time")
        return Unhealthy(f"shard {self.rank} failed: {error.details() or code.name}")


class CallStreams:
    """One stream to each shard, for calls that go to all shards and are answered in order."""

    def __init__(self, shards: Sequence[ShardClient]) -> None:
        self.open = True
        self._shards = shards
        self._outgoing: list[asyncio.Queue[pb.Call]] = [asyncio.Queue() for _ in shards]
        self._streams = [shard.stub.Run(_all_of(out)) for shard, out in zip(shards, self._outgoing, strict=True)]
        self._turn = asyncio.Lock()
        self._answered = 0  # number of calls that all shards have answered
        self._silent: set[int] = set()

    @property
    def silent(self) -> list[ShardClient]:
        """The shards that have not answered the call of the last `responses`."""
        return [self._shards[rank] for rank in sorted(self._silent)]

    def send(self, call: pb.Call) -> None:
        call.answered = self._answered
        for outgoing in self._outgoing:
            outgoing.put_nowait(call)

    async def responses(self) -> list[pb.Answer]:
        """Returns the responses to the next call, in rank order. Raises GenerationFailed as soon as one shard fails."""
        async with self._turn:
            self._silent = set(range(len(self._streams)))
            if len(self._streams) == 1:
                responses = [await self._response_of(0)]
            else:
                responses = await _all(map(self._response_of, range(len(self._streams))))
            self._answered += 1
            return responses

    def close(self) -> None:
        """Cancels the streams: the shards drop their batches and answer no further calls."""
        self.open = False
        for stream in self._streams:
            stream.cancel()

    async def _response_of(self, rank: int) -> pb.Answer:
        try:
            response: pb.Answer = await self._streams[rank].read()
        except grpc.aio.AioRpcError as error:
            raise GenerationFailed(f"shard {rank} cannot be reached") from error
        if response is grpc.aio.EOF:
            raise GenerationFailed(f"shard {rank} ended the stream")
        if response.HasField("failure"):
            raise GenerationFailed(f"shard {rank} failed: {response.failure.reason}")
        self._silent.discard(rank)
        return response


class PendingResponse:
    """A call that has been sent to all shards. Wait for responses in the order of sending, or cancel."""

    __slots__ = ("_streams", "_timeout")

    def __init__(self, streams: CallStreams, timeout_s: float) -> None:
        self._streams = streams
        self._timeout = timeout_s

    async def response(self) -> pb.Answer:
        """Returns the response, which is the same for all shards. Raises GenerationFailed if a shard fails or differs.

        After a failure no other call in flight is answered.
        """
        try:
            async with asyncio.timeout(self._timeout):
                return _agreed(await self._streams.responses())
        except TimeoutError as error:
            self.cancel()
            raise GenerationFailed(await _fault_of(self._streams.silent)) from error
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancels all calls in flight, as they share the streams."""
        self._streams.close()


class ShardedClient:
    """Sends every call to all shards, in the same order, and returns the response on which they agree.

    Calls that change the batch share one stream to each shard. It is opened by the first call, and again by the first
    one after a failure.

    in_use: a context that keeps the model awake, entered by other calls that need the model.
    """

    def __init__(self, shards: Sequence[ShardClient], *, call_timeout_s: float = 300.0) -> None:
        """call_timeout_s: seconds after which a call of the stream counts as failed."""
        self.in_use: Callable[[], AbstractAsyncContextManager[None]] = nullcontext
        self._shards = tuple(shards)
        self._timeout = call_timeout_s
        self._streams: CallStreams | None = None

    @classmethod
    async def connect(
        cls, master_uds_path: str, *, timeout_s: float = 30.0, call_timeout_s: float = 300.0
    ) -> "ShardedClient":
        """Asks the shard at `master_uds_path` for the addresses of all shards, and connects to each.

        Raises Unhealthy if a shard does not answer within `timeout_s` seconds.
        """
        master = ShardClient(f"unix://{master_uds_path.removeprefix('unix://')}", 0)
        try:
            places = await master.siblings(timeout_s)
        finally:
            await master.close()
        shards = [ShardClient(url, rank, grammar_url) for rank, (url, grammar_url) in enumerate(places)]
        client = cls(shards, call_timeout_s=call_timeout_s)
        try:
            await client._meet(timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
        if self._streams is not None:
            self._streams.close()
        for shard in self._shards:
            await shard.close()

    async def _meet(self, timeout_s: float) -> None:
        """Waits until all shards listen. Raises Unhealthy."""
        await asyncio.gather(*(shard.siblings(timeout_s) for shard in self._shards))

    async def info(self, timeout_s: float = 30.0) -> pb.InfoResponse:
        """Returns the first shard's description of the model. Raises Unhealthy.

        Once all shards are warmed up, it has the smallest capacity of all. `shares_memory` is True if all shards can
        read this process's memory.
        """
        probe = _probe()
        request = pb.InfoRequest(probe=None if probe is None else shared_to_message(probe))
        responses: list[pb.InfoResponse] = await self._ask("Info", request, timeout_s)
        responses[0].shares_memory = all(response.shares_memory for response in responses)
        if all(response.HasField("capacity") for response in responses):
            responses[0].capacity.CopyFrom(_smallest(response.capacity for response in responses))
        else:
            responses[0].ClearField("limits")
        return responses[0]

    async def warmup(self, request: pb.WarmupRequest, timeout_s: float | None = None) -> pb.WarmupResponse:
        """Warms up all shards. Returns the capacity that every shard has. Raises Unhealthy.

        timeout_s: None: no time-out, as it takes as long as the largest step.
        """
        responses: list[pb.WarmupResponse] = await self._ask("Warmup", request, timeout_s)
        return _smallest(responses)

    async def health(self, timeout_s: float) -> None:
        """Has every shard compute something. Raises Unhealthy if one fails or takes more than `timeout_s` seconds."""
        await self._ask("Health", pb.HealthRequest(), timeout_s)

    async def compile(self, grammar: pb.Grammar, pin: int, client: str, timeout_s: float = 120.0) -> pb.CompileResponse:
        """Has every shard compile a grammar, concurrently with steps. Returns a response, that of a refusal if any.

        The first shard tries the grammar, and the others use its result, so that all decide the same. They keep the
        grammar until `pin`, a unique number, is released. client: name for fair scheduling.

        Raises Overloaded if too many grammars are being compiled, and Unhealthy.
        """
        tried, fault = None, None
        asked: list[ShardClient] = []
        try:
            for shards in filter(None, (self._shards[:1], self._shards[1:])):
                asked += shards
                ask = partial(
                    ShardClient.compile, grammar=grammar, pin=pin, client=client, tried=tried, timeout_s=timeout_s
                )
                responses: list[pb.CompileResponse] = await self._ask_each(ask, shards)
                tried = tried or responses[0]
                refusal = next((response for response in responses if response.error), None)
                if refusal is not None:
                    fault = refusal.error
                    return refusal
            assert tried is not None
            return tried
        except BaseException as error:
            fault = str(error)
            raise
        finally:
            if fault is not None:
                for shard in asked:
                    shard.release(pin)

    def release(self, pin: int) -> None:
        """Releases the grammar with this pin on all shards, if it was compiled at all."""
        for shard in self._shards:
            shard.release(pin)

    async def encode(self, request: pb.EncodeRequest, timeout_s: float = 300.0) -> pb.EncodeResponse:
        """Has the first shard encode texts. Raises Unhealthy."""
        async with self.in_use():
            responses: list[pb.EncodeResponse] = await self._ask_each(
                lambda shard: shard.stub.Encode(request, timeout=timeout_s), self._shards[:1]
            )
        return responses[0]

    async def encode_images(
        self, images: Iterable[Image], target_gap_ms: float = 0.0, timeout_s: float = 300.0
    ) -> None:
        """Has every shard encode images, concurrently with steps.

        target_gap_ms: target time between two tokens of running requests meanwhile; 0: the shards' default.
        Raises InvalidRequest for images that the model cannot process, and Unhealthy.
        """
        request = pb.EncodeImagesRequest(images=map(image_to_message, images), target_gap_ms=target_gap_ms)

        async def encode(shard: ShardClient) -> None:
            try:
                await shard.stub.EncodeImages(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT):
                    raise InvalidRequest(error.details() or "the model cannot process the image") from error
                raise

        async with self.in_use():
            await self._ask_each(encode)

    async def load_adapter(
        self, adapter_id: str, folder: str, *, check_only: bool = False, timeout_s: float = 300.0
    ) -> pb.LoadAdapterResponse:
        """Has every shard load an adapter from a folder, concurrently with steps. check_only: True drops it afterwards.

        Raises InvalidRequest if it does not fit the model, and Unhealthy.
        """
        request = pb.LoadAdapterRequest(adapter_id=adapter_id, folder=folder, check_only=check_only)

        async def load(shard: ShardClient) -> pb.LoadAdapterResponse:
            try:
                response: pb.LoadAdapterResponse = await shard.stub.LoadAdapter(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise InvalidRequest(error.details() or "the adapter does not fit the model") from error
                raise
            return response

        async with self.in_use():
            responses: list[pb.LoadAdapterResponse] = await self._ask_each(load)
        return responses[0]

    async def unload_adapter(self, adapter_id: str, timeout_s: float = 60.0) -> None:
        """Has every shard unload an adapter, which no step in flight may use. Raises Unhealthy."""
        async with self.in_use():
            await self._ask("UnloadAdapter", pb.UnloadAdapterRequest(adapter_id=adapter_id), timeout_s)

    async def sleep(self, *, grammars: bool = False, timeout_s: float = 600.0) -> int:
        """Puts every shard to sleep. Returns the bytes of memory that they freed. Raises CannotSleep and Unhealthy.

        grammars: True frees the tables for grammars, too. After an error some of the shards may sleep.
        """
        request = pb.SleepRequest(grammars=grammars)

        async def sleep(shard: ShardClient) -> int:
            try:
                response: pb.SleepResponse = await shard.stub.Sleep(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    raise CannotSleep(error.details() or "the model cannot sleep") from error
                raise
            return response.released_bytes

        return sum(await self._ask_each(sleep))

    async def wake(self, timeout_s: float = 600.0) -> None:
        """Wakes every shard. Raises Unhealthy."""
        await self._ask("Wake", pb.WakeRequest(), timeout_s)

    async def describe_files(self, timeout_s: float = 30.0) -> list[pb.DescribeFilesResponse]:
        """Returns each shard's description of its files, such as their layout. Raises Unhealthy, also without files."""
        responses: list[pb.DescribeFilesResponse] = await self._ask(
            "DescribeFiles", pb.DescribeFilesRequest(), timeout_s
        )
        return responses

    async def store_file(self, request: pb.PrefixFile) -> tuple[set[int], int]:
        """Has every shard write a file. Returns the shards' ranks, and the bytes of all files.

        Raises InvalidRequest if a shard cannot, once all have ended; Unhealthy if some may still be writing.
        """
        responses = await self._transfer("StoreFile", request)
        return set(range(len(responses))), sum(response.bytes for response in responses)

    async def load_file(self, request: pb.PrefixFile) -> tuple[int, float]:
        """Has every shard read from its file. Returns the bytes that all have read, and the seconds of the slowest.

        Raises InvalidRequest if a shard cannot, once all have ended; Unhealthy if some may still be reading.
        """
        responses = await self._transfer("LoadFile", request)
        return sum(response.bytes for response in responses), max(response.read_ns for response in responses) / 1e9

    async def _transfer(self, method: str, request: pb.PrefixFile) -> list[Any]:
        """Calls `method` of all shards. No time-out: only a response tells that a shard is done with the blocks."""
        calls = (getattr(shard.stub, method)(request) for shard in self._shards)
        responses: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        refusals = []
        for shard, response in zip(self._shards, responses, strict=True):
            if isinstance(response, grpc.aio.AioRpcError):
                if response.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                    raise shard.explain(response)
                refusals.append(response.details() or "")
            elif isinstance(response, BaseException):
                raise response
        if refusals:
            raise InvalidRequest(refusals[0])
        return responses

    def send(self, call: pb.Call, timeout_s: float | None = None) -> PendingResponse:
        """Sends a call at once. timeout_s: seconds to wait for its response; None: `call_timeout_s`."""
        if self._streams is None or not self._streams.open:
            self._streams = CallStreams(self._shards)
        self._streams.send(call)
        return PendingResponse(self._streams, self._timeout if timeout_s is None else timeout_s)

    async def _ask(self, method: str, request: Any, timeout_s: float | None) -> list[Any]:
        return await self._ask_each(lambda shard: getattr(shard.stub, method)(request, timeout=timeout_s))

    async def _ask_each(
        self, call: Callable[[ShardClient], Awaitable[Any]], shards: Sequence[ShardClient] | None = None
    ) -> list[Any]:
        """Returns the responses of `shards`, by default of all. Raises Unhealthy for an error of gRPC."""

        async def ask(shard: ShardClient) -> Any:
            try:
                return await call(shard)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and len(self._shards) > 1:
                    raise Unhealthy(await _fault_of(self._shards)) from error
                raise shard.explain(error) from error

        return await _all(map(ask, self._shards if shards is None else shards))


def _probe() -> SharedBytes | None:
    """Returns shared memory that the shards try to read; None if this system has none."""
    try:
        return SharedMemory.of([b"oatmill"])[0]
    except OSError:
        return None


async def _fault_of(silent: Sequence[ShardClient]) -> str:
    """Returns an error message that names the shard at fault. Other shards may be silent because they wait for it."""
    connects = await asyncio.gather(*(shard.connects() for shard in silent))
    frozen = next((shard.rank for shard, well in zip(silent, connects, strict=True) if not well), None)
    if frozen is None:
        return f"shard {silent[0].rank} did not answer in time"
    return f"shard {frozen} does not respond; its process is frozen, or cannot be reached"


async def _all(responses: Iterable[Awaitable[Response]]) -> list[Response]:
    """Returns all responses in order. Raises the first failure at once: other shards may hang in a collective."""
    waits = [asyncio.ensure_future(response) for response in responses]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        for wait in waits:
            if wait in done:
                wait.result()  # raises what failed
        return [wait.result() for wait in waits]
    except BaseException:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        raise


async def _all_of(queue: asyncio.Queue[pb.Call]) -> AsyncIterator[pb.Call]:
    while True:
        yield await queue.get()


def _smallest(capacities: Iterable[pb.WarmupResponse]) -> pb.WarmupResponse:
    all_of_them = list(capacities)
    return pb.WarmupResponse(
        num_blocks=min(capacity.num_blocks for capacity in all_of_them),
        max_total_tokens=min(capacity.max_total_tokens for capacity in all_of_them),
        max_batch_total_tokens=min(capacity.max_batch_total_tokens for capacity in all_of_them),
        fallbacks=dict.fromkeys(reason for capacity in all_of_them for reason in capacity.fallbacks),
        num_snapshots=min(capacity.num_snapshots for capacity in all_of_them),
        max_batch_size=min(capacity.max_batch_size for capacity in all_of_them),
        max_prefill_tokens=min(capacity.max_prefill_tokens for capacity in all_of_them),
    )


def _agreed(responses: list[pb.Answer]) -> pb.Answer:
    first = responses[0]
    expected = _tokens(first.step) if len(responses) > 1 else None
    for rank, response in enumerate(responses[1:], start=1):
        if _tokens(response.step) != expected:
            raise GenerationFailed(f"shard {rank} computed other tokens than shard 0: the shards are out of step")
    return first


def _tokens(step: pb.StepResponse) -> list[tuple[int, list[int], int]]:
    return [(item.request_id, list(item.token_ids), item.finish_reason) for item in step.generations]
