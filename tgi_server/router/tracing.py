"""One span for each request, in the caller's trace; the shards' spans follow it."""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from shared.tracing import extract_context, trace_headers


class RequestTracer:
    """Makes spans, or nothing at all when nobody collects them."""

    def __init__(self, *, enabled: bool) -> None:
        self._tracer = trace.get_tracer("tgi_server.router") if enabled else None

    def start(self, name: str, headers: Mapping[str, str]) -> Span | None:
        if self._tracer is None:
            return None
        return self._tracer.start_span(name, context=extract_context(headers), kind=SpanKind.SERVER)

    def context(self, span: Span | None) -> dict[str, str]:
        """What a shard needs to carry the trace on."""
        if span is None:
            return {}
        with trace.use_span(span):
            return trace_headers()

    def end(self, span: Span | None, attributes: Mapping[str, str | int | float], error: str | None) -> None:
        if span is None:
            return
        span.set_attributes(attributes)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()
