"""OpenTelemetry for a service: off unless an OTLP endpoint is given; W3C trace context in and out."""

from collections.abc import Mapping

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

# One export may take this long, so that an unavailable collector delays nothing.
EXPORT_SECONDS = 5

# W3C baggage is left out: nothing here reads it, and OpenTelemetry repeats what is wrong with a caller's in the log.
_TRACE_CONTEXT = TraceContextTextMapPropagator()


def configure_tracing(service: str, otlp_endpoint: str | None) -> None:
    """Sends this process's spans to the OTLP collector (gRPC) at `otlp_endpoint`, such as `http://localhost:4317`.

    Without an endpoint nothing is recorded, and spans cost next to nothing. Call `stop_tracing` before the end.
    """
    if not otlp_endpoint:
        return
    # Imported here: the exporter takes half a second to load, and most processes never need it.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    exporter = OTLPSpanExporter(
        endpoint=otlp_endpoint, insecure=not otlp_endpoint.startswith("https://"), timeout=EXPORT_SECONDS
    )
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def stop_tracing() -> None:
    """Sends the spans that have not been sent yet."""
    if shutdown := getattr(trace.get_tracer_provider(), "shutdown", None):
        shutdown()


def extract_context(headers: Mapping[str, str]) -> Context:
    """Returns the caller's trace context, from its HTTP headers or gRPC metadata (keys in lower case)."""
    return _TRACE_CONTEXT.extract(headers, context=context.get_current())


def trace_headers(span: Span) -> dict[str, str]:
    """Returns the headers that carry `span` on to the next service; none when nothing is traced."""
    headers: dict[str, str] = {}
    _TRACE_CONTEXT.inject(headers, context=trace.set_span_in_context(span))
    return headers
