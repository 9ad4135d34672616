"""The router's end of its contract with the shards (proto/generate.proto)."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import grpc

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import TextGenerationServiceStub
from tgi_server.router.errors import GenerationFailed, RouterError, Unhealthy

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]

Response = TypeVar("Response")
OrderedRequest = pb.PrefillRequest | pb.DecodeRequest | pb.FilterBatchRequest | pb.ClearCacheRequest


class ShardClient:
    """A channel to one shard, and its methods."""

    def __init__(self, url: str, rank: int) -> None:
        """url: as gRPC spells it, unix:///path or ipv4:ADDRESS:PORT."""
        self.rank = rank
        self._channel = grpc.aio.insecure_channel(url, options=_CHANNEL_OPTIONS)
        self.stub = TextGenerationServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def siblings(self, timeout_s: float) -> list[str]:
        """The addresses of all shards in rank order, once this one listens. Raises Unhealthy."""
        try:
            found: pb.ServiceDiscoveryResponse = await self.stub.ServiceDiscovery(
                pb.ServiceDiscoveryRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise self.explain(error, Unhealthy) from error
        return list(found.urls)

    def explain(self, error: grpc.aio.AioRpcError, kind: type[RouterError]) -> RouterError:
        """One line for the client and the log."""
        code = error.code()
        if code is grpc.StatusCode.UNAVAILABLE:
            return kind(f"shard {self.rank} cannot be reached")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return kind(f"shard {self.rank} did not answer in time")
        return kind(f"shard {self.rank} failed: {error.details() or code.name}")


class PendingAnswer(Generic[Response]):
    """A call that has been sent to every shard. Nobody else cancels it: `cancel` or wait for `answer`."""

    __slots__ = ("_agree", "_calls", "_shards")

    def __init__(
        self,
        shards: Sequence[ShardClient],
        calls: list[grpc.aio.UnaryUnaryCall],
        agree: Callable[[list[Response]], Response],
    ) -> None:
        self._shards = shards
        self._calls = calls
        self._agree = agree

    async def answer(self) -> Response:
        """What all shards agree on. Raises GenerationFailed as soon as one of them fails, or when they disagree."""
        if len(self._calls) == 1:
            try:
                return await self._calls[0]
            except grpc.aio.AioRpcError as error:
                raise self._shards[0].explain(error, GenerationFailed) from error
        return self._agree(await _all(self._shards, self._calls, GenerationFailed))

    def cancel(self) -> None:
        for call in self._calls:
            call.cancel()


class ShardedClient:
    """Sends every call to all shards, in the same order, and gives back the one answer that they agree on.

    The methods that the contract orders (prefill, decode, filter_batch, clear_cache) number their calls; they send
    at once, and what they return waits for the answer.
    """

    def __init__(self, shards: Sequence[ShardClient], *, call_timeout_s: float = 300.0) -> None:
        """call_timeout_s: after so many seconds a call counts as failed."""
        self._shards = tuple(shards)
        self._timeout = call_timeout_s
        self._sequence = 0

    @classmethod
    async def connect(
        cls, master_uds_path: str, *, timeout_s: float = 30.0, call_timeout_s: float = 300.0
    ) -> "ShardedClient":
        """Asks the shard behind `master_uds_path` for its siblings, and opens a channel to each.

        Raises Unhealthy when one of them does not answer within `timeout_s` seconds.
        """
        master = ShardClient(f"unix://{master_uds_path.removeprefix('unix://')}", 0)
        try:
            urls = await master.siblings(timeout_s)
        finally:
            await master.close()
        client = cls([ShardClient(url, rank) for rank, url in enumerate(urls)], call_timeout_s=call_timeout_s)
        try:
            await client._meet(timeout_s)
        except BaseException:
            await client.close()
            raise
        return client

    async def close(self) -> None:
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
        """Has every shard compile a grammar; steps go on meanwhile. Why it cannot be used, in one line; None: it can.

        Raises Unhealthy.
        """
        answers: list[pb.CompileResponse] = await self._ask("Compile", pb.CompileRequest(grammar=grammar), timeout_s)
        return next((answer.error for answer in answers if answer.error), None)

    def prefill(self, request: pb.PrefillRequest) -> PendingAnswer[pb.StepResponse]:
        return self._send("Prefill", request, _agreed_step)

    def decode(self, request: pb.DecodeRequest) -> PendingAnswer[pb.StepResponse]:
        return self._send("Decode", request, _agreed_step)

    def filter_batch(self, request: pb.FilterBatchRequest) -> PendingAnswer[pb.FilterBatchResponse]:
        return self._send("FilterBatch", request, _first)

    def clear_cache(
        self, request: pb.ClearCacheRequest, timeout_s: float | None = None
    ) -> PendingAnswer[pb.ClearCacheResponse]:
        return self._send("ClearCache", request, _first, timeout_s)

    def _send(
        self,
        method: str,
        request: OrderedRequest,
        agree: Callable[[list[Response]], Response],
        timeout_s: float | None = None,
    ) -> PendingAnswer[Response]:
        self._sequence += 1
        request.sequence = self._sequence
        timeout = self._timeout if timeout_s is None else timeout_s
        calls = [getattr(shard.stub, method)(request, timeout=timeout) for shard in self._shards]
        return PendingAnswer(self._shards, calls, agree)

    async def _ask(self, method: str, request: Any, timeout_s: float | None) -> list[Any]:
        calls = [getattr(shard.stub, method)(request, timeout=timeout_s) for shard in self._shards]
        return await _all(self._shards, calls, Unhealthy)


async def _all(
    shards: Sequence[ShardClient], calls: Sequence[grpc.aio.UnaryUnaryCall], kind: type[RouterError]
) -> list[Any]:
    """All answers in rank order. The first failure ends the wait: the other shards may hang in a collective."""
    waits = [asyncio.ensure_future(_answer_of(shard, call, kind)) for shard, call in zip(shards, calls, strict=True)]
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_EXCEPTION)
        for wait in waits:
            if wait in done:
                wait.result()  # raises what failed
        return [wait.result() for wait in waits]
    except BaseException:
        for call in calls:
            call.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        raise


async def _answer_of(shard: ShardClient, call: grpc.aio.UnaryUnaryCall, kind: type[RouterError]) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise shard.explain(error, kind) from error


def _first(answers: list[Response]) -> Response:
    return answers[0]


def _agreed_step(answers: list[pb.StepResponse]) -> pb.StepResponse:
    expected = _tokens(answers[0])
    for rank, answer in enumerate(answers[1:], start=1):
        if _tokens(answer) != expected:
            raise GenerationFailed(f"shard {rank} computed other tokens than shard 0: the shards are out of step")
    return answers[0]


def _tokens(answer: pb.StepResponse) -> list[tuple[int, list[int], int]]:
    return [(item.request_id, list(item.token_ids), item.finish_reason) for item in answer.generations]
