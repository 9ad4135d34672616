"""The router's end of its contract with the shards (proto/generate.proto)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import GrammarServiceStub, TextGenerationServiceStub
from tgi_server.router.errors import GenerationFailed, Overloaded, Unhealthy

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    # A shard that is not there yet may be there any moment.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.enable_http_proxy", 0),
]

Response = TypeVar("Response")


class ShardClient:
    """Channels to one shard, and its methods.

    stub: of its TextGenerationService. grammar_stub: of its GrammarService.
    """

    def __init__(self, url: str, rank: int, grammar_url: str | None = None) -> None:
        """url: as gRPC spells it, unix:///path or ipv4:ADDRESS:PORT. grammar_url: of the GrammarService, if known."""
        self.rank = rank
        self._channels = [grpc.aio.insecure_channel(url, options=_CHANNEL_OPTIONS)]
        self.stub = TextGenerationServiceStub(self._channels[0])
        if grammar_url is not None:
            self._channels.append(grpc.aio.insecure_channel(grammar_url, options=_CHANNEL_OPTIONS))
            self.grammar_stub = GrammarServiceStub(self._channels[1])

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def siblings(self, timeout_s: float) -> list[tuple[str, str]]:
        """The addresses of all shards' two services in rank order, once this one listens. Raises Unhealthy."""
        try:
            found: pb.ServiceDiscoveryResponse = await self.stub.ServiceDiscovery(
                pb.ServiceDiscoveryRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise self.explain(error) from error
        return list(zip(found.urls, found.grammar_urls, strict=True))

    async def compile(self, request: pb.CompileRequest, timeout_s: float) -> str:
        """Returns why the grammar cannot be used, or nothing. Raises Overloaded, and what else gRPC raises."""
        try:
            response: pb.CompileResponse = await self.grammar_stub.Compile(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Overloaded(f"the grammar cannot be compiled now: {error.details()}") from error
            raise
        return response.error

    def explain(self, error: grpc.aio.AioRpcError) -> Unhealthy:
        """One line for the client and the log."""
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            return Unhealthy(f"shard {self.rank} cannot be reached")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Unhealthy(f"shard {self.rank} did not answer in time")
        return Unhealthy(f"shard {self.rank} failed: {error.details() or code.name}")


class CallStreams:
    """A stream of calls to each of some shards, for calls that go to all of them and are answered in turn."""

    def __init__(self, shards: Sequence[ShardClient]) -> None:
        self.open = True
        self._shards = shards
        self._outgoing: list[asyncio.Queue[pb.Call]] = [asyncio.Queue() for _ in shards]
        self._streams = [shard.stub.Run(_all_of(out)) for shard, out in zip(shards, self._outgoing, strict=True)]
        self._turn = asyncio.Lock()
        self._silent: set[int] = set()

    @property
    def silent(self) -> str:
        """The first of the shards that have not answered the call whose answers were asked for last."""
        return f"shard {min(self._silent)}"

    def send(self, call: pb.Call) -> None:
        for outgoing in self._outgoing:
            outgoing.put_nowait(call)

    async def answers(self) -> list[pb.Answer]:
        """To the next call, in rank order. Raises GenerationFailed as soon as one shard fails."""
        async with self._turn:
            self._silent = set(range(len(self._streams)))
            if len(self._streams) == 1:
                return [await self._answer_of(0)]
            return await _all(map(self._answer_of, range(len(self._streams))))

    def close(self) -> None:
        """The shards forget what they hold; calls that have not been answered never are."""
        self.open = False
        for stream in self._streams:
            stream.cancel()

    async def _answer_of(self, rank: int) -> pb.Answer:
        try:
            answer = await self._streams[rank].read()
        except grpc.aio.AioRpcError as error:
            raise GenerationFailed(f"shard {rank} cannot be reached") from error
        if answer is grpc.aio.EOF:
            raise GenerationFailed(f"shard {rank} ended the stream")
        if answer.HasField("failure"):
            raise GenerationFailed(f"shard {rank} failed: {answer.failure.reason}")
        self._silent.discard(rank)
        return answer


class PendingAnswer(Generic[Response]):
    """A call that has been sent to every shard. Wait for its answer in the order of sending, or cancel it."""

    __slots__ = ("_agree", "_streams", "_timeout")

    def __init__(self, streams: CallStreams, timeout_s: float, agree: Callable[[list[pb.Answer]], Response]) -> None:
        self._streams = streams
        self._timeout = timeout_s
        self._agree = agree

    async def answer(self) -> Response:
        """What all shards agree on. Raises GenerationFailed when one of them fails, or when they disagree.

        After a failure nothing else that was sent to them is answered.
        """
        try:
            async with asyncio.timeout(self._timeout):
                return self._agree(await self._streams.answers())
        except TimeoutError as error:
            self.cancel()
            raise GenerationFailed(f"{self._streams.silent} did not answer in time") from error
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancels all that was sent with it, too: shards do one thing after the other."""
        self._streams.close()


class ShardedClient:
    """Sends every call to all shards, in the same order, and gives back the one answer that they agree on.

    The methods that change the batch (prefill, decode, filter_batch, clear_cache) send at once, and what they return
    waits for the answer. They share one stream to each shard, which is opened with the first of them, and again with
    the next one after a failure.
    """

    def __init__(self, shards: Sequence[ShardClient], *, call_timeout_s: float = 300.0) -> None:
        """call_timeout_s: after so many seconds a call counts as failed."""
        self._shards = tuple(shards)
        self._timeout = call_timeout_s
        self._streams: CallStreams | None = None

    @classmethod
    async def connect(
        cls, master_uds_path: str, *, timeout_s: float = 30.0, call_timeout_s: float = 300.0
    ) -> "ShardedClient":
        """Asks the shard behind `master_uds_path` for its siblings, and opens a channel to each.

        Raises Unhealthy when one of them does not answer within `timeout_s` seconds.
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
        """What the first shard loaded. Raises Unhealthy."""
        answers: list[pb.InfoResponse] = await self._ask("Info", pb.InfoRequest(), timeout_s)
        return answers[0]

    async def warmup(self, request: pb.WarmupRequest, timeout_s: float | None = None) -> pb.WarmupResponse:
        """What fits on every shard. Takes as long as the largest step does. Raises Unhealthy."""
        answers: list[pb.WarmupResponse] = await self._ask("Warmup", request, timeout_s)
        return pb.WarmupResponse(
            num_blocks=min(answer.num_blocks for answer in answers),
            max_total_tokens=min(answer.max_total_tokens for answer in answers),
            max_batch_total_tokens=min(answer.max_batch_total_tokens for answer in answers),
        )

    async def health(self, timeout_s: float) -> None:
        """Every shard computes something. Raises Unhealthy when one of them cannot, within `timeout_s` seconds."""
        await self._ask("Health", pb.HealthRequest(), timeout_s)

    async def compile(self, grammar: pb.Grammar, timeout_s: float = 60.0) -> str | None:
        """Has every shard compile a grammar; steps go on meanwhile. Returns why it cannot be used, or None if it can.

        The first shard tries it before the others, which take its word, so that all of them decide alike. Raises
        Overloaded when too many grammars are being compiled, and Unhealthy.
        """

        async def ask(shards: Sequence[ShardClient], *, tried: bool) -> str | None:
            request = pb.CompileRequest(grammar=grammar, tried=tried)
            faults: list[str] = await self._ask_each(lambda shard: shard.compile(request, timeout_s), shards)
            return next(filter(None, faults), None)

        fault = await ask(self._shards[:1], tried=False)
        return await ask(self._shards[1:], tried=True) if fault is None and self._shards[1:] else fault

    def prefill(self, request: pb.PrefillRequest) -> PendingAnswer[pb.StepResponse]:
        return self._send(pb.Call(prefill=request), _agreed_step)

    def decode(self, request: pb.DecodeRequest) -> PendingAnswer[pb.StepResponse]:
        return self._send(pb.Call(decode=request), _agreed_step)

    def filter_batch(self, request: pb.FilterBatchRequest) -> PendingAnswer[pb.FilterBatchResponse]:
        return self._send(pb.Call(filter_batch=request), lambda answers: answers[0].filter_batch)

    def clear_cache(
        self, request: pb.ClearCacheRequest, timeout_s: float | None = None
    ) -> PendingAnswer[pb.ClearCacheResponse]:
        return self._send(pb.Call(clear_cache=request), lambda answers: answers[0].clear_cache, timeout_s)

    def _send(
        self, call: pb.Call, agree: Callable[[list[pb.Answer]], Response], timeout_s: float | None = None
    ) -> PendingAnswer[Response]:
        if self._streams is None or not self._streams.open:
            self._streams = CallStreams(self._shards)
        self._streams.send(call)
        return PendingAnswer(self._streams, self._timeout if timeout_s is None else timeout_s, agree)

    async def _ask(self, method: str, request: Any, timeout_s: float | None) -> list[Any]:
        return await self._ask_each(lambda shard: getattr(shard.stub, method)(request, timeout=timeout_s))

    async def _ask_each(
        self, call: Callable[[ShardClient], Awaitable[Any]], shards: Sequence[ShardClient] | None = None
    ) -> list[Any]:
        """shards: None: all."""

        async def ask(shard: ShardClient) -> Any:
            try:
                return await call(shard)
            except grpc.aio.AioRpcError as error:
                raise shard.explain(error) from error

        return await _all(map(ask, self._shards if shards is None else shards))


async def _all(answers: Iterable[Awaitable[Response]]) -> list[Response]:
    """All of them in order. The first failure ends the wait: the other shards may hang in a collective."""
    waits = [asyncio.ensure_future(answer) for answer in answers]
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


def _agreed_step(answers: list[pb.Answer]) -> pb.StepResponse:
    step = answers[0].step
    expected = _tokens(step) if len(answers) > 1 else None
    for rank, answer in enumerate(answers[1:], start=1):
        if _tokens(answer.step) != expected:
            raise GenerationFailed(f"shard {rank} computed other tokens than shard 0: the shards are out of step")
    return step


def _tokens(answer: pb.StepResponse) -> list[tuple[int, list[int], int]]:
    return [(item.request_id, list(item.token_ids), item.finish_reason) for item in answer.generations]
