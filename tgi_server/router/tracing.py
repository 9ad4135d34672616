"""Spans of each request, in the caller's trace: one for all of it, and one for each thing that it waited for."""

from collections.abc import Mapping
from time import perf_counter_ns, time_ns

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from shared.tracing import extract_context, trace_headers

# Seconds of `time.perf_counter`.
Moment = float


class RequestTracer:
    """Makes spans, or nothing at all when none are collected."""

    def __init__(self, *, enabled: bool) -> None:
        self._tracer = trace.get_tracer("tgi_server.router") if enabled else None

    def start(self, name: str, headers: Mapping[str, str]) -> Span | None:
        """Begins a span. headers: of the caller's request, keys in lower case."""
        if self._tracer is None:
            return None
        return self._tracer.start_span(name, context=extract_context(headers), kind=SpanKind.SERVER)

    def context(self, span: Span | None) -> dict[str, str]:
        """Returns what a shard needs to carry the trace on."""
        if span is None:
            return {}
        return trace_headers(span)

    def trace_id(self, span: Span | None) -> str | None:
        """Returns the id of the trace in hexadecimal; None where nothing is traced."""
        return None if span is None else trace.format_trace_id(span.get_span_context().trace_id)

    def phases(self, span: Span | None, phases: Mapping[str, tuple[Moment, Moment]]) -> None:
        """Adds children to `span` for what is over: name, begin, end."""
        if span is None or self._tracer is None:
            return
        offset = time_ns() - perf_counter_ns()
        for name, (begin, end) in phases.items():
            child = self._tracer.start_span(
                name, context=trace.set_span_in_context(span), start_time=offset + int(begin * 1e9)
            )
            child.end(offset + int(end * 1e9))

    def end(self, span: Span | None, attributes: Mapping[str, AttributeValue], error: str | None) -> None:
        """Ends a span. error: why the request failed."""
        if span is None:
            return
        span.set_attributes(attributes)
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end()
