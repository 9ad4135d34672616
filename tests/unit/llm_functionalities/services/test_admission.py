"""Calls through the interceptor of a real gRPC server whose one method does as it is told."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from llm_functionalities.endpoint.call import Deadline
from llm_functionalities.errors import InvalidArgument, TooBusy
from llm_functionalities.metrics import ServiceMetrics
from llm_functionalities.services.admission import CANCELLED_SECONDS, MOST_CANCELLED, CallAdmission, CancelledCalls
from llm_functionalities.services.context import CallContext
from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.timing import SECONDS, eventually


class Servicer(llm_pb2_grpc.LLMRunnerServicer):
    """Responds with the prompt. `fault` is raised instead; `gate` is awaited first."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.fault: Exception | None = None
        self.begun = 0
        self.ended = 0

    async def call_model(self, request: llm_pb2.ModelRequest, context: CallContext) -> llm_pb2.ModelResponse:
        self.begun += 1
        await self.gate.wait()
        if self.fault is not None:
            raise self.fault
        return llm_pb2.ModelResponse(text=request.formatted_prompt)

    async def stream_model(
        self, request: llm_pb2.ModelRequest, context: CallContext
    ) -> AsyncIterator[llm_pb2.ModelResponse]:
        context.deadline = Deadline.after(5)
        try:
            for word in request.formatted_prompt.split():
                yield llm_pb2.ModelResponse(text=word)
                await self.gate.wait()
        finally:
            self.ended += 1


@pytest.fixture
def metrics() -> ServiceMetrics:
    return ServiceMetrics()


@pytest.fixture
async def servicer() -> Servicer:
    return Servicer()


@pytest.fixture
def receive_timeout() -> float:
    return SECONDS


@pytest.fixture
async def channel(
    servicer: Servicer, metrics: ServiceMetrics, receive_timeout: float
) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[CallAdmission(2, metrics, max_entries=3, receive_timeout=receive_timeout)])
    llm_pb2_grpc.add_LLMRunnerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


@pytest.fixture
def runner(channel: grpc.aio.Channel) -> Any:
    return llm_pb2_grpc.LLMRunnerStub(channel)


def counted(metrics: ServiceMetrics, method: str, status: str) -> float:
    return metrics.calls.labels(f"/LLMRunner/{method}", status)._value.get()


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details()


async def test_a_call_and_a_stream(runner: Any, metrics: ServiceMetrics) -> None:
    assert (await runner.call_model(llm_pb2.ModelRequest(formatted_prompt="hello"))).text == "hello"
    request = llm_pb2.ModelRequest(formatted_prompt="one two three")
    assert [part.text async for part in runner.stream_model(request)] == ["one", "two", "three"]
    assert counted(metrics, "call_model", "OK") == 1
    assert counted(metrics, "stream_model", "OK") == 1


async def test_more_calls_than_there_are_places_are_refused(
    runner: Any, servicer: Servicer, metrics: ServiceMetrics
) -> None:
    servicer.gate.clear()
    calls = [runner.call_model(llm_pb2.ModelRequest(formatted_prompt="x")) for _ in range(2)]
    await eventually(lambda: servicer.begun == 2)
    assert b"llm_functionalities_calls_running 2.0" in generate_latest(metrics.registry)
    code, details = await refusal(runner.call_model(llm_pb2.ModelRequest()))
    assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert details == "2 calls are running, which is the maximum; try again later"
    servicer.gate.set()
    assert [(await call).text for call in calls] == ["x", "x"]
    assert (await runner.call_model(llm_pb2.ModelRequest(formatted_prompt="y"))).text == "y"
    assert counted(metrics, "call_model", "RESOURCE_EXHAUSTED") == 1


async def test_a_call_without_a_place_is_refused_before_its_message_is_received(
    channel: grpc.aio.Channel, runner: Any, servicer: Servicer
) -> None:
    servicer.gate.clear()
    calls = [runner.call_model(llm_pb2.ModelRequest(formatted_prompt="x")) for _ in range(2)]
    await eventually(lambda: servicer.begun == 2)
    no_message_yet = channel.stream_unary("/LLMRunner/call_model")()
    assert await no_message_yet.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    servicer.gate.set()
    assert [(await call).text for call in calls] == ["x", "x"]


async def test_a_refusal_of_the_service_is_a_status(runner: Any, servicer: Servicer, metrics: ServiceMetrics) -> None:
    servicer.fault = InvalidArgument("the number is too large")
    code, details = await refusal(runner.call_model(llm_pb2.ModelRequest()))
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "the number is too large")
    assert counted(metrics, "call_model", "INVALID_ARGUMENT") == 1


@pytest.mark.logs_tracebacks
async def test_a_fault_of_the_service_is_counted_and_logged(
    runner: Any, servicer: Servicer, metrics: ServiceMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    servicer.fault = ZeroDivisionError("a fault")
    call = runner.call_model(llm_pb2.ModelRequest(), metadata=(("x-request-id", "the-caller's-7"),))
    code, details = await refusal(call)
    assert (code, "the-caller's-7" in details, "a fault" in details) == (grpc.StatusCode.INTERNAL, True, False)
    assert counted(metrics, "call_model", "INTERNAL") == 1
    assert "ZeroDivisionError: a fault" in caplog.text
    assert [(record.levelname, record.request_id) for record in caplog.records] == [("ERROR", "the-caller's-7")]


@pytest.mark.parametrize("given", ["the-caller's-7", None, "two words", "x" * 129])
async def test_each_call_has_a_request_id(given: str | None, runner: Any, servicer: Servicer) -> None:
    metadata = (("x-request-id", given),) if given else ()
    call = runner.call_model(llm_pb2.ModelRequest(), metadata=metadata)
    await call
    sent_back = dict(await call.trailing_metadata())["x-request-id"]
    assert sent_back == given if given == "the-caller's-7" else len(sent_back) == 32
    servicer.fault = InvalidArgument("no")
    call = runner.call_model(llm_pb2.ModelRequest(), metadata=metadata)
    await refusal(call)
    assert "x-request-id" in dict(await call.trailing_metadata())


async def test_an_abandoned_stream_is_closed_and_gives_its_place_back(
    runner: Any, servicer: Servicer, metrics: ServiceMetrics
) -> None:
    servicer.gate.clear()
    for number in range(5):
        stream = runner.stream_model(llm_pb2.ModelRequest(formatted_prompt="one two"))
        assert (await stream.read()).text == "one"
        stream.cancel()
        await eventually(lambda number=number: servicer.ended == number + 1)
    await eventually(lambda: counted(metrics, "stream_model", "CANCELLED") == 5)


@pytest.mark.parametrize("receive_timeout", [0.3])
async def test_a_request_that_does_not_arrive_is_given_up(channel: grpc.aio.Channel, metrics: ServiceMetrics) -> None:
    call = channel.stream_unary("/LLMRunner/call_model")()
    assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert await call.details() == "the request's message did not arrive within 0.3 s"
    assert counted(metrics, "call_model", "DEADLINE_EXCEEDED") == 1


@pytest.mark.parametrize("message", [None, b"\x0a\x05ab"])
async def test_a_call_without_a_message_of_its_kind_is_refused(
    message: bytes | None, channel: grpc.aio.Channel
) -> None:
    call = channel.stream_unary("/LLMRunner/call_model")()
    if message is not None:
        await call.write(message)
    await call.done_writing()
    assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_connection_that_cancels_everything_is_refused_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    cancelled = CancelledCalls()
    for _ in range(MOST_CANCELLED - 1):
        cancelled.cancelled("one")
    cancelled.check("one")
    cancelled.cancelled("one")
    with pytest.raises(TooBusy, match="has cancelled 1000 calls in a row"):
        cancelled.check("one")
    cancelled.check("another")
    now += CANCELLED_SECONDS
    cancelled.check("one")


def test_a_connection_whose_calls_come_to_their_end_may_cancel_others() -> None:
    cancelled = CancelledCalls()
    for number in range(5 * MOST_CANCELLED):
        cancelled.cancelled("one")
        if number % 500 == 0:
            cancelled.ended("one")
    cancelled.check("one")
