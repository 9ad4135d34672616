"""A shard whose services run in the router's own process, on its event loop: no gRPC, and no socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from shared.stubs import generate_pb2 as pb
from tgi_server.router.scheduling.shard_client import ShardClient

# Maximum number of grammars that are compiled at once, each in a thread, as in a shard's process.
_GRAMMAR_CALLS = 256


class LocalShard(ShardClient):
    """Calls the services of a shard in this process directly, instead of gRPC stubs.

    A step blocks the event loop while it is computed, as in a shard's process.
    """

    def __init__(self, service: Any, grammars: Any) -> None:
        """service: a TextGenerationServiceServicer with coroutines. grammars: a GrammarServiceServicer with blocking
        methods.
        """
        self.rank = 0
        self._released: list[int] = []
        self._threads = ThreadPoolExecutor(_GRAMMAR_CALLS, "grammar-calls")
        self.stub: Any = _Stub(service)
        self.grammar_stub: Any = _GrammarStub(grammars, self._threads)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def connects(self) -> bool:
        return True


class _Context:
    """Replaces gRPC's context of a call. gone: done when the caller no longer waits."""

    def __init__(self) -> None:
        self.gone: Future[None] = Future()

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)

    def add_callback(self, callback: Callable[[], None]) -> None:
        self.gone.add_done_callback(lambda _: callback())


class _Stub:
    """The methods of the generation service, with the signatures of a gRPC stub."""

    def __init__(self, service: Any) -> None:
        self._service = service

    def Run(self, calls: AsyncIterator[pb.Call]) -> "_Stream":
        return _Stream(self._service.Run(_in_turn(calls), _Context()))

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self._service, name)

        async def call(request: Any, **options: Any) -> Any:
            return await _answered(method(request, _Context()), options.get("timeout"))

        return call


class _GrammarStub:
    def __init__(self, service: Any, threads: ThreadPoolExecutor) -> None:
        self._service = service
        self._threads = threads

    async def Compile(self, request: pb.CompileRequest, **options: Any) -> pb.CompileResponse:
        context = _Context()
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._threads, self._service.Compile, request, context)
        try:
            response: pb.CompileResponse = await _answered(compiling, options.get("timeout"))
        finally:
            context.gone.set_result(None)
        return response


class _Stream:
    """The answers of a stream of calls, with the interface of a gRPC call."""

    def __init__(self, answers: AsyncIterator[pb.Answer]) -> None:
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.create_task(self._take(answers))

    async def read(self) -> Any:
        return await self._answers.get()

    def cancel(self) -> None:
        self._task.cancel()

    async def _take(self, answers: AsyncIterator[pb.Answer]) -> None:
        try:
            async for answer in answers:
                self._answers.put_nowait(answer)
        finally:
            self._answers.put_nowait(grpc.aio.EOF)


async def _in_turn(calls: AsyncIterator[pb.Call]) -> AsyncIterator[pb.Call]:
    """Yields each call after a round of the event loop, so that a step's tokens are sent before the next step."""
    async for call in calls:
        await asyncio.sleep(0)
        yield call


async def _answered(work: Awaitable[Any], seconds: float | None) -> Any:
    """Returns a copy of the response. Raises AioRpcError if it takes longer than `seconds`."""
    try:
        response = await asyncio.wait_for(work, seconds)
    except TimeoutError:
        _Context().abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {seconds} s")
    copied = type(response)()
    copied.CopyFrom(response)
    return copied
