"""Spans of a shard's work for a request: its prefill, then its decode, in the router's trace."""

from collections.abc import Iterable
from dataclasses import dataclass

from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from shared.stubs import generate_pb2 as pb
from shared.tracing import extract_context
from tgi_server.engine.step import Generation


@dataclass(slots=True)
class _Traced:
    """A request of the batch. steps: number of decode steps. in_batch: sum of the batch sizes in these steps."""

    context: Context
    span: Span
    decoding: bool = False
    steps: int = 0
    in_batch: int = 0
    tokens: int = 0


class RequestSpans:
    """The open span of each traced request in the batch: `prefill` until its first token, then `decode`.

    A request that resumes after a preemption gets both again.
    """

    def __init__(self, tracer: Tracer, rank: int) -> None:
        """rank: rank of this shard, an attribute of its spans."""
        self._tracer = tracer
        self._rank = rank
        self._requests: dict[int, _Traced] = {}

    def joining(self, requests: Iterable[pb.Request]) -> None:
        """Opens the spans of requests that join the batch. Call it before their first step."""
        for request in requests:
            if request.trace_context:
                context = extract_context(request.trace_context)
                span = self._start("prefill", context)
                span.set_attribute("prompt_tokens", len(request.input_ids) + len(request.generated_ids))
                span.set_attribute("cached_tokens", request.cached_tokens)
                self._requests[request.id] = _Traced(context, span)

    def stepped(self, generations: Iterable[Generation], batch_size: int) -> None:
        """Records the tokens of a step. batch_size: number of requests in that step."""
        counted = set()  # requests that have several tokens of this step
        for generation in generations:
            traced = self._requests.get(generation.request_id)
            if traced is None:
                continue
            if not traced.decoding:
                self._begin_decode(traced, batch_size)
            elif generation.request_id not in counted:
                traced.steps += 1
                traced.in_batch += batch_size
            counted.add(generation.request_id)
            traced.tokens += 1 + len(generation.jump_forward)
            if generation.error or generation.finish_reason:
                reason = generation.finish_reason.value if generation.finish_reason else None
                self._end(generation.request_id, reason, generation.error)

    def keep(self, request_ids: Iterable[int], error: str | None = None) -> None:
        """Ends the spans of all other requests. error: the reason, unless they were done or cancelled."""
        for request_id in self._requests.keys() - set(request_ids):
            self._end(request_id, None, error)

    def _begin_decode(self, traced: _Traced, batch_size: int) -> None:
        traced.span.set_attribute("batch_size", batch_size)
        traced.span.end()
        traced.span = self._start("decode", traced.context)
        traced.decoding = True

    def _end(self, request_id: int, finish_reason: str | None, error: str | None) -> None:
        traced = self._requests.pop(request_id)
        if traced.decoding:
            traced.span.set_attribute("generated_tokens", traced.tokens)
            traced.span.set_attribute("steps", traced.steps)
            traced.span.set_attribute("mean_batch_size", traced.in_batch / max(traced.steps, 1))
        if finish_reason is not None:
            traced.span.set_attribute("finish_reason", finish_reason)
        if error:
            traced.span.set_status(Status(StatusCode.ERROR, error))
        traced.span.end()

    def _start(self, name: str, context: Context) -> Span:
        return self._tracer.start_span(name, context=context, attributes={"rank": self._rank})
