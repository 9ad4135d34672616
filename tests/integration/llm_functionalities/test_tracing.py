"""Traces, against a collector of our own."""

import time

import pytest

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.collector import running_collector
from tests.fakes.model_server import ModelServer
from tests.integration.llm_functionalities.service import running_service

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"


def test_a_trace_goes_from_the_caller_through_the_service_to_the_model() -> None:
    with running_collector() as received, ModelServer() as server:
        flags = ("--endpoint", server.url, "--otlp-endpoint", received.endpoint)
        with running_service(*flags, "--otlp-service-name", "front") as service, service.channel() as channel:
            stub = llm_pb2_grpc.LLMRunnerStub(channel)
            metadata = (("traceparent", f"00-{TRACE}-{SPAN}-01"),)
            stub.call_model(llm_pb2.ModelRequest(formatted_prompt="x"), metadata=metadata)
            list(stub.stream_model(llm_pb2.ModelRequest(formatted_prompt="x"), metadata=metadata))
            stub.call_model(llm_pb2.ModelRequest(formatted_prompt="x"))
    assert {span.service for span in received.spans} == {"front"}
    assert [span.name for span in received.spans] == [
        "LLMRunner/call_model",
        "LLMRunner/stream_model",
        "LLMRunner/call_model",
    ]
    for span, request in zip(received.spans, server.requests, strict=True):
        assert request.headers["traceparent"].startswith(f"00-{span.trace}-{span.id}-")
    assert [span.trace == TRACE for span in received.spans] == [True, True, False]
    assert [span.parent == SPAN for span in received.spans] == [True, True, False]


@pytest.mark.slow
def test_a_collector_that_is_away_delays_nothing() -> None:
    with ModelServer() as server:
        flags = ("--endpoint", server.url, "--otlp-endpoint", "http://127.0.0.1:9")
        with running_service(*flags) as service, service.runner() as runner:
            begun = time.monotonic()
            for _ in range(20):
                assert runner.call_model(llm_pb2.ModelRequest(formatted_prompt="x")).text
            assert time.monotonic() - begun < 1
            begun = time.monotonic()
            assert service.stop() == 0
            assert time.monotonic() - begun < 8


def test_without_a_collector_nothing_is_traced() -> None:
    with ModelServer() as server, running_service("--endpoint", server.url) as service, service.runner() as runner:
        assert runner.call_model(llm_pb2.ModelRequest(formatted_prompt="x")).text
        assert "traceparent" not in server.requests[0].headers


def test_baggage_of_a_caller_is_neither_read_nor_passed_on() -> None:
    baggage = ",".join(f"k{number}=v" for number in range(200)) + "," + "x" * 5000  # more than W3C allows
    with ModelServer() as server, running_service("--endpoint", server.url) as service, service.runner() as runner:
        for value in (baggage, "a=1", "nonsense"):
            request = llm_pb2.ModelRequest(formatted_prompt="x")
            assert runner.call_model(request, metadata=(("baggage", value),)).text
    assert not any("baggage" in request.headers for request in server.requests)
    assert not any("WARNING" in line or "baggage" in line for line in service.log)
