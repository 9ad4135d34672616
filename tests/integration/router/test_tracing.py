"""Spans reach an OpenTelemetry collector, in the caller's trace."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as collector_pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as collector_grpc

from tests.integration.router.process import Start

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(collector_grpc.TraceServiceServicer):
    """Keeps spans by name."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.services: set[str] = set()

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            self.services |= {
                each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        return collector_pb.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    kept = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    collector_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(None)


def test_spans_of_a_request(start: Start, flags: tuple[str, list[str]], collector: tuple[Collector, str]):
    (url, arguments), (kept, endpoint) = flags, collector
    process = start(*arguments, f"--otlp-endpoint={endpoint}", "--otlp-service-name=the-router").until_ready(url)
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 3}}
    assert httpx.post(f"{url}/generate", json=body, headers=headers, timeout=30).status_code == 200
    httpx.post(f"{url}/generate_stream", json={"inputs": ""}, headers=headers, timeout=30)
    process.popen.terminate()
    assert process.wait() == 0
    assert kept.services == {"the-router"}
    whole = kept.spans["/generate"]
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, CALLER)
    assert {each.key: each.value.int_value for each in whole.attributes}["generated_tokens"] == 3
    for name in ("validation", "queue", "inference"):
        part = kept.spans[name]
        assert part.parent_span_id == whole.span_id
        assert part.start_time_unix_nano <= part.end_time_unix_nano
        assert abs(part.start_time_unix_nano - whole.start_time_unix_nano) < 10e9
    refused = kept.spans["/generate_stream"]
    assert refused.status.code == 2
    assert "must not be empty" in refused.status.message
