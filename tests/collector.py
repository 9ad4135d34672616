"""An OpenTelemetry collector (OTLP over gRPC) that keeps the spans it is sent."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """A span, with its ids as hexadecimal text and its attributes as Python values. parent: empty for a root."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict[str, Any]
    error: str | None


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """spans: in the order of their arrival."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.endpoint = ""

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            self.spans += [_received(span, service) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> ReceivedSpan:
        """The only span of this name."""
        (span,) = (span for span in self.spans if span.name == name)
        return span


@contextmanager
def running_collector() -> Iterator[Collector]:
    """On a free port; `endpoint` is its URL."""
    server = grpc.server(ThreadPoolExecutor(2))
    collector = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None)


def _received(span: Any, service: str) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else None,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
