"""The sequences that are generated for one request: how they are queued, waited for, and sent."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.responses import Response

from tgi_server.router.api.access import cache_namespace
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.encoding import EVENTS, compute_headers, json_response, timing_headers
from tgi_server.router.api.event_stream import EventStream, Outbox, StreamEnd
from tgi_server.router.errors import RouterError
from tgi_server.router.submission import KeptPrefix, PreparedRequest
from tgi_server.router.text.prefix_miss import PrefixMiss
from tgi_server.router.text.stop_sequences import StopSequences
from tgi_server.router.text.token_stream import AnyStream, CollectedTokens, Formatter, OnEnd, TokenStream

# Bytes of a stream that may wait for a client who reads.
_UNREAD_BYTES = 65_536
# Seconds for which a prompt with a `prompt_cache_key` is held, as OpenAI does.
_KEPT_SECONDS = 300.0
# Bytes of a token in an answer that is held as a whole, and of each alternative to it.
_TOKEN_BYTES, _ALTERNATIVE_BYTES = 320, 200
# Bytes of a sequence, and of a token of its prompt until the sequence ends: a number in a list, one for the scheduler,
# and the number itself where no other sequence has it.
_SEQUENCE_BYTES, _PROMPT_BYTES, _NUMBER_BYTES = 3_000, 12, 32
# Sent by the clients of OpenAI and Anthropic, in seconds, and by Envoy, in milliseconds.
_READ_TIMEOUT, _ENVOY_TIMEOUT = "x-stainless-read-timeout", "x-envoy-expected-rq-timeout-ms"
_TIME_LIMITS = frozenset({_READ_TIMEOUT.encode(), _ENVOY_TIMEOUT.encode()})

F = TypeVar("F", bound=Formatter)


@dataclass(frozen=True, slots=True)
class _Generated:
    """A sequence, and the bytes that a token of its prompt takes while it runs and until it is sent, and one of its
    text.
    """

    id: int
    stream: AnyStream
    running_bytes: int
    sent_bytes: int
    text_bytes: int

    @property
    def runs(self) -> bool:
        return self.stream.finish_reason is None


class RequestGeneration:
    """The sequences of one request. When the request frees its places, sequences that still run are cancelled."""

    def __init__(self, admission: Admission) -> None:
        self.service = admission.service
        self.admission = admission
        self._record = admission.record
        self._time_limits = TimeLimits.of(admission.request.headers)
        self._sequences: list[_Generated] = []
        self._last_prompt: list[int] = []
        self._outbox: Outbox | None = None
        self._collects = True
        admission.on_release = self._cancel
        admission.lease.answer = self._answer_bytes

    def begin(
        self,
        prepared: PreparedRequest,
        output: F,
        on_end: OnEnd,
        *,
        shown: Collection[int] = (),
        keep: KeptPrefix | None = None,
    ) -> TokenStream[F]:
        """Queues a sequence, which `output` writes. shown: special tokens that are part of the text.

        keep: its prompt stays in the prefix cache; None: if it has a `prompt_cache_key`.
        """
        service, admission, options = self.service, self.admission, prepared.options
        if keep is None and options.prompt_cache_key is not None:
            keep = KeptPrefix(options.prompt_cache_key, _KEPT_SECONDS)
        stream = TokenStream(
            service.text.tokenizer,
            prepared.input_ids,
            StopSequences(options.stop, reveal=options.include_stop) if options.stop else None,
            output,
            on_end,
            stop_ids=frozenset(options.stop_token_ids),
            min_tokens=options.sampling.min_tokens,
            shown=shown if options.skip_special_tokens else service.text.tokenizer.special_tokens,
            observe_gap=service.metrics.requests.gap,
        )
        namespace = cache_namespace(admission.tenant, options.cache_salt)
        source = prepared.source if service.policy.explain_misses != "off" else None
        if source is not None:
            source.shared = not namespace and service.policy.explain_misses == "own"
        self._record.note_sequence(stream, options, prepared.unenforced, source, namespace)
        request_id = next(service.request_ids)
        self._hold(request_id, stream, prepared)
        deadline, first_token_by = self._time_limits.deadlines(
            self._record.arrived, options.timeout_ms, streams=isinstance(on_end, StreamEnd)
        )
        service.submitter.submit(
            replace(
                prepared,
                id=request_id,
                source=source,
                cache_namespace=namespace,
                trace_context=self._record.trace_context,
                deadline=deadline,
                first_token_by=first_token_by,
                tenant=admission.tenant,
                weight=1.0 if admission.key is None else admission.key.weight,
                keep=keep,
            ),
            stream,
        )
        return stream

    def _hold(self, request_id: int, stream: AnyStream, prepared: PreparedRequest) -> None:
        """Counts what the sequence holds in memory."""
        report = prepared.options.report
        shared = prepared.input_ids is self._last_prompt or bool(report.scored_token_ids)
        self._last_prompt = prepared.input_ids
        self._sequences.append(
            _Generated(
                request_id,
                stream,
                _PROMPT_BYTES + (0 if shared else _NUMBER_BYTES),
                (_TOKEN_BYTES + _ALTERNATIVE_BYTES * report.prefill_top_n) * report.prefill_logprobs,
                _TOKEN_BYTES + _ALTERNATIVE_BYTES * report.top_n_tokens,
            )
        )

    def _answer_bytes(self) -> int:
        """Returns roughly the bytes of the answers that are generated and not sent, and of the prompts' texts."""
        size = self._record.source_bytes + (0 if self._outbox is None else self._outbox.waiting)
        for each in self._sequences:
            prompt = each.sent_bytes + (each.running_bytes if each.runs else 0)
            size += _SEQUENCE_BYTES + prompt * each.stream.input_length
            size += each.text_bytes * each.stream.generated_tokens * self._collects
        return size

    def _cancel(self) -> None:
        for each in self._sequences:
            if each.runs:
                self._record.progress = self.service.submitter.cancel(each.id) or self._record.progress

    async def collect(self, requests: Sequence[PreparedRequest]) -> list[TokenStream[CollectedTokens]]:
        """Generates one sequence for each request, all at once, and returns them once all have ended.

        Raises GenerationFailed.
        """
        end = AllEnded(len(requests))
        streams = [self.begin(prepared, CollectedTokens(), end) for prepared in requests]
        await end.future
        return streams

    @property
    def miss(self) -> PrefixMiss | None:
        """Returns the part of the prompt's explanation that the client may see; None if nothing was looked up."""
        return self._record.shown_miss

    def respond(self, content: Any, *, characters: int, streams: Sequence[AnyStream]) -> Response:
        """Returns a response in one piece. content: an object, or JSON. characters: of the prompts. streams: the
        sequences that it shows.
        """
        headers = timing_headers(
            self.service.model.compute_type,
            self._record.times,
            characters=characters,
            prompt_tokens=sum(stream.input_length for stream in streams),
            generated_tokens=sum(stream.generated_tokens for stream in streams),
        )
        if len(streams) == 1 and (reason := streams[0].finish_reason) is not None:
            headers["x-finish-reason"] = reason.value
        return json_response(content, headers | self._record.headers)

    def stream_end(
        self,
        outbox: Outbox,
        *,
        sequences: int = 1,
        last_words: Callable[[], bytes] = bytes,
        trailer: bytes = b"",
    ) -> StreamEnd:
        """Returns what is reported at the end of each sequence; after the last one nothing more is generated."""
        return StreamEnd(outbox, self._record.path, self.admission.release, sequences, last_words, trailer)

    def stream(
        self, outbox: Outbox, *, characters: int, collects: bool = False, media_type: str = EVENTS
    ) -> EventStream:
        """Returns the response that sends what is written into `outbox`; at its end the admission is closed.

        characters: of the prompts. collects: the answer is held as a whole until its end.

        Raises the error of a sequence that has failed already, so that the response has its status.
        """
        if outbox.error is not None:
            raise outbox.error
        self._outbox, self._collects = outbox, collects
        self.admission.lease.end = self._fail
        headers = compute_headers(self.service.model.compute_type, characters=characters)
        return EventStream(outbox, headers | self._record.headers, self.admission.close, media_type)

    def _fail(self, error: RouterError) -> bool:
        """Ends the stream with an error. Returns False if nothing runs, or the client does not read."""
        running = [each.stream for each in self._sequences if each.runs]
        if self.admission.closed or not running or (self._outbox and self._outbox.waiting > _UNREAD_BYTES):
            return False
        running[0].failed(error)
        return True


class AllEnded:
    """Waits for the end of several sequences; the first failure ends the wait."""

    def __init__(self, sequences: int) -> None:
        self._open = sequences
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: RouterError | None) -> None:
        self._open -= 1
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
            self.future.exception()  # the waiting task may have left
        elif not self._open:
            self.future.set_result(None)


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds for the whole answer, and seconds that may pass without a byte of it."""

    whole: float = inf
    silence: float = inf

    @classmethod
    def of(cls, headers: Headers) -> "TimeLimits":
        """Returns the limits in the headers of a request. A value that is not a positive number sets no limit."""
        if not any(name in _TIME_LIMITS for name, _ in headers.raw):
            return _NO_LIMITS
        return cls(_positive(headers.get(_ENVOY_TIMEOUT)) / 1000, _positive(headers.get(_READ_TIMEOUT)))

    def deadlines(self, arrived: float, timeout_ms: int, *, streams: bool) -> tuple[float, float]:
        """Returns the times by which the answer and its first token have to be there.

        timeout_ms: the limit in the request's body; 0: none. streams: a stream breaks its silence with its first token.
        """
        whole = min(self.whole, timeout_ms / 1000 if timeout_ms else inf)
        return arrived + (whole if streams else min(whole, self.silence)), arrived + self.silence


_NO_LIMITS = TimeLimits()


def _positive(value: str | None) -> float:
    try:
        number = float(value or "")
    except ValueError:
        return inf
    return number if isfinite(number) and number > 0 else inf
