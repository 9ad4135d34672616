"""The record of one request: notes for the response's headers, and at the end its log line, metrics and span."""

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from secrets import token_hex
from time import perf_counter, perf_counter_ns, time_ns

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue
from starlette.requests import Request

from shared.tracing import extract_context, trace_headers
from tgi_server.contract import GenerationOptions
from tgi_server.router.api.encoding import shortened
from tgi_server.router.errors import (
    CannotBeInTime,
    ClientGone,
    GenerationFailed,
    InvalidRequest,
    RequestTimedOut,
    RouterError,
    shown_message,
    shown_status,
)
from tgi_server.router.metrics import RequestTimes
from tgi_server.router.prompt_source import PromptSource
from tgi_server.router.schemas.validation import Ignored
from tgi_server.router.service import Service
from tgi_server.router.text.prefix_miss import PrefixMiss, explain
from tgi_server.router.text.token_stream import AnyStream

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_REQUEST_ID_KEY = "request_id"  # in the state of a request's scope
_INDEX = re.compile(r"\[\d+\]")
_CHATS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"})
# Maximum number of ignored members that are reported for a request, and of names of ignored members that are logged.
_MOST_REPORTED, _MOST_LOGGED = 10, 1000

Fields = dict[str, str | int | float]  # of a line of the log, or of a span


class RequestRecord:
    """Collects the facts of a request for log, metrics and spans: arrival, ignored members, sequences, outcome.

    read_tokens: number of input tokens of a request that generates nothing. progress: progress of a cancelled request.
    """

    def __init__(self, service: Service, request: Request) -> None:
        self._service = service
        self._metrics = service.metrics.requests
        self._times: RequestTimes | None = None
        self.path: str = request.scope["path"]
        self.request_id = request_id(request)
        self.arrived = perf_counter()
        self._span = self._begun_span(request)
        self.read_tokens = 0
        self.progress = ""
        self._requested: Fields = {}
        self._streams: list[AnyStream] = []
        self._sources: dict[PromptSource, PrefixMiss | None] = {}
        self._namespace = ""
        self._adapters: set[str | None] = set()
        self._ignored: list[str] = []
        self._unenforced: list[str] = []
        self._schema_reading: list[str] = []

    def note_ignored(self, members: Iterable[Ignored]) -> None:
        """Records members of the body that have no effect. Raises InvalidRequest for them with --strict-fields."""
        policy = self._service.policy
        for member in islice(members, _MOST_REPORTED):
            if policy.strict_fields:
                raise InvalidRequest.at(member.path, member.fault)
            self._ignored.append(f"{member.path} ({member.note})" if member.note else member.path)
            name = _INDEX.sub("[]", member.path)
            if name not in policy.ignored_fields and len(policy.ignored_fields) < _MOST_LOGGED:
                policy.ignored_fields.add(name)
                logger.warning("%s: `%s` is ignored: it %s", self.path, member.path, member.fault)

    def note_model(self, model: str) -> None:
        """Records the model that a request without generation names."""
        self._requested = {"gen_ai.request.model": model}

    def note_sequence(
        self,
        stream: AnyStream,
        options: GenerationOptions,
        unenforced: Sequence[str],
        source: PromptSource | None = None,
        namespace: str = "",
    ) -> None:
        """Records a sequence that is about to be generated.

        unenforced: constraints that are left to the model. source: the texts of its prompt. namespace: its cache
        namespace.
        """
        self._streams.append(stream)
        if source is not None:
            self._sources.setdefault(source, None)
            self._namespace = namespace
        if new := [constraint for constraint in unenforced if constraint not in self._unenforced]:
            self._unenforced += new
            logger.info("%s: constraints are left to the model: %s", self.path, shortened(new))
        if options.grammar is not None and options.grammar.reading:
            self._schema_reading = [options.grammar.reading]
        self._metrics.validated(stream.input_length, options.stopping.max_new_tokens)
        if options.adapter_id not in self._adapters:
            self._adapters.add(options.adapter_id)
            self._metrics.computed_by(options.adapter_id)
        self._requested = {
            "gen_ai.request.model": options.adapter_id or self._service.model.names[0],
            "gen_ai.request.max_tokens": options.stopping.max_new_tokens,
            "gen_ai.request.temperature": options.sampling.temperature if options.sampling.do_sample else 0.0,
        }

    @property
    def headers(self) -> dict[str, str]:
        """Headers for the response: the request's id, and notes on how the request was interpreted."""
        notes = (
            ("x-unenforced-constraints", self._unenforced),
            ("x-ignored-fields", self._ignored),
            ("x-schema-reading", self._schema_reading),
        )
        return {"x-request-id": self.request_id} | {name: shortened(lines) for name, lines in notes if lines}

    @property
    def trace_context(self) -> dict[str, str]:
        """The trace context for the shards."""
        return {} if self._span is None else trace_headers(self._span)

    @property
    def source_bytes(self) -> int:
        """Approximate bytes of the prompts' source texts, which are held until the request ends."""
        return sum(source.size for source in self._sources)

    @property
    def misses(self) -> list[PrefixMiss]:
        """The explanations of all prompts that were looked up so far; the one with most missing tokens comes first."""
        for source, miss in self._sources.items():
            if miss is None:
                self._sources[source] = explain(source, self._service.text.tokenizer)
        found = [miss for miss in self._sources.values() if miss is not None]
        return sorted(found, key=lambda miss: -miss.missing_tokens) if len(found) > 1 else found

    @property
    def shown_miss(self) -> PrefixMiss | None:
        """The part of the first explanation that the client may see; None if no prompt was looked up."""
        return self._shown(self.misses)

    def _shown(self, misses: Sequence[PrefixMiss]) -> PrefixMiss | None:
        if not misses:
            return None
        shared = any(source.shared for source in self._sources)
        return misses[0].as_shared() if shared else misses[0]

    @property
    def total_time(self) -> float:
        """Seconds since the request arrived."""
        return perf_counter() - self.arrived

    @property
    def times(self) -> RequestTimes:
        """The times of the request's phases, by its slowest sequence. Available once all sequences have ended."""
        if self._times is None:
            self._times = self._measured()
        return self._times

    def _measured(self) -> RequestTimes:
        slowest = self._slowest
        inference = slowest.ended_at - slowest.started_at
        return RequestTimes(
            total=self.total_time,
            validation=slowest.queued_at - self.arrived,
            queue=slowest.started_at - slowest.queued_at,
            inference=inference,
            per_token=inference / max(slowest.generated_tokens, 1),
            first_token=min(stream.first_token_at for stream in self._streams) - self.arrived,
        )

    @property
    def _slowest(self) -> AnyStream:
        return max(self._streams, key=lambda stream: stream.ended_at)

    def end(self, error: BaseException | None) -> None:
        """Writes the record. error: the reason if the request failed."""
        misses = self.misses
        if (shown := self._shown(misses)) is not None:
            self._service.explained.add(self._namespace, self.request_id, shown)
        for miss in misses:
            if miss.cause is not None:
                self._metrics.missed(miss.cause, miss.missing_tokens)
        for source in self._sources:  # the prompt history keeps it, and it must not keep earlier prompts in memory
            source.lookup = None
        if error is not None:
            self._failed(error)
        elif self._streams:
            self._generated(misses)
        else:
            self._computed()
        self._streams.clear()  # breaks a reference cycle: the end of a stream refers to its request

    def _generated(self, misses: Sequence[PrefixMiss]) -> None:
        times, slowest = self.times, self._slowest
        generated = sum(stream.generated_tokens for stream in self._streams)
        prompt_tokens = sum(stream.input_length for stream in self._streams)
        self._metrics.succeeded(times, generated)
        fields: Fields = {
            "total_time": Milliseconds.of(times.total),
            "validation_time": Milliseconds.of(times.validation),
            "queue_time": Milliseconds.of(times.queue),
            "inference_time": Milliseconds.of(times.inference),
            "time_per_token": Milliseconds.of(times.per_token),
            "time_to_first_token": Milliseconds.of(times.first_token),
            "prompt_tokens": prompt_tokens,
            "generated_tokens": generated,
        }
        if misses:
            fields["cached_tokens"] = sum(miss.found_tokens for miss in misses)
            if (cause := misses[0].cause) is not None:
                fields["prefix_miss"] = cause.value
        logger.info("%s answered", self.path, extra=fields | self._identity(200))
        if self._span is None:
            return
        self._add_span("validation", self.arrived, slowest.queued_at)
        self._add_span("queue", slowest.queued_at, slowest.started_at)
        self._add_span("inference", slowest.started_at, slowest.ended_at)
        # OpenTelemetry's semantic conventions for generative AI.
        conventional: dict[str, str | int | float | Sequence[str]] = {
            "gen_ai.operation.name": "chat" if self.path in _CHATS else "text_completion",
            "gen_ai.provider.name": "oatmill",
            "gen_ai.response.model": self._requested["gen_ai.request.model"],
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": generated,
            "gen_ai.response.finish_reasons": [
                stream.finish_reason.value for stream in self._streams if stream.finish_reason is not None
            ],
        }
        self._end_span({**fields, **conventional, **self._requested})

    def _computed(self) -> None:
        seconds, tokens = self.total_time, self.read_tokens
        self._metrics.answered(seconds, tokens)
        fields: Fields = {"total_time": Milliseconds.of(seconds), "prompt_tokens": tokens}
        logger.info("%s answered", self.path, extra=fields | self._identity(200))
        self._end_span({**fields, **self._requested, "gen_ai.usage.input_tokens": tokens})

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, asyncio.CancelledError):  # requests are cancelled when the time to finish them is up
            error = GenerationFailed("the server is shutting down")
        shown = error if isinstance(error, RouterError) else ClientGone("the client disconnected")
        message, status = shown_message(shown, self.path), shown_status(shown, self.path)
        self._metrics.failed(shown.error_type)
        fault = (status >= 500 or status == 424) and not isinstance(shown, RequestTimedOut | CannotBeInTime)
        expected = isinstance(shown, ClientGone) or self._service.policy.is_local  # a program gets exceptions
        level = logging.INFO if expected else logging.WARNING
        fields: Fields = {"error_type": shown.error_type, "total_time": Milliseconds.of(self.total_time)}
        logger.log(
            logging.ERROR if fault else level,
            "%s failed: %s",
            self.path,
            f"{message}; {self.progress}" if isinstance(shown, ClientGone) and self.progress else message,
            extra=fields | self._identity(status),
            exc_info=shown.__cause__ if type(shown) is RouterError else None,
        )
        self._end_span({**fields, "error.type": shown.error_type, **self._requested}, message)

    def _identity(self, status: int) -> Fields:
        """Returns the fields that identify the request in its log line."""
        fields: Fields = {"request_id": self.request_id, "status": status, "model": self._service.model.names[0]}
        if adapters := sorted(filter(None, self._adapters)):
            fields["adapter"] = ",".join(adapters)
        if self._span is not None:
            fields["trace_id"] = trace.format_trace_id(self._span.get_span_context().trace_id)
        return fields

    def _begun_span(self, request: Request) -> Span | None:
        """Starts the request's span in the caller's trace. Returns None if tracing is off."""
        if (tracer := self._service.tracer) is None:
            return None
        return tracer.start_span(self.path, context=extract_context(request.headers), kind=SpanKind.SERVER)

    def _add_span(self, phase: str, began: float, ended: float) -> None:
        """Adds a span for a phase of the request, between two times of `perf_counter`."""
        if self._span is None or (tracer := self._service.tracer) is None:
            return
        offset = time_ns() - perf_counter_ns()
        parent = trace.set_span_in_context(self._span)
        tracer.start_span(phase, context=parent, start_time=offset + int(began * 1e9)).end(offset + int(ended * 1e9))

    def _end_span(self, attributes: Mapping[str, AttributeValue], error: str | None = None) -> None:
        """Ends the request's span. error: the reason if the request failed."""
        if self._span is None:
            return
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class Milliseconds(float):
    """A duration in milliseconds: a number in JSON logs, with its unit in text logs."""

    @classmethod
    def of(cls, seconds: float) -> "Milliseconds":
        return cls(round(seconds * 1000, 3))

    def __str__(self) -> str:
        return f"{float(self):.3f}ms"

    def __format__(self, _: str) -> str:
        return str(self)


def request_id(request: Request) -> str:
    """Returns the caller's `x-request-id`, or a new id. Response and log have it, too."""
    state = request.scope["state"]
    found: str | None = state.get(_REQUEST_ID_KEY)
    if found is None:
        given = request.headers.get("x-request-id", "")
        found = state[_REQUEST_ID_KEY] = given if given and _REQUEST_ID.fullmatch(given) else token_hex(16)
    return found
