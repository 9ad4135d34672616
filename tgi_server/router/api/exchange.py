"""One client's request, from its arrival to the last byte of its response."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from itertools import islice
from time import perf_counter
from typing import Any, TypeVar
from uuid import uuid4

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from shared.stubs import generate_pb2 as pb
from tgi_server.router.api.access import cache_namespace, key_of, tenant_of
from tgi_server.router.api.body import SMALL, read_body, read_json
from tgi_server.router.api.connections import network_of
from tgi_server.router.api.encoding import (
    compute_headers,
    json_response,
    shortened,
    timing_headers,
    to_json,
)
from tgi_server.router.api.event_stream import EventStream, Outbox, StreamEnd
from tgi_server.router.api.memory import lease_of
from tgi_server.router.api.time_limits import TimeLimits
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
from tgi_server.router.schemas.validation import ignored, validate
from tgi_server.router.service import Service
from tgi_server.router.submission import KeptPrefix, ValidRequest
from tgi_server.router.text.encoder import ServedEncoder, Values
from tgi_server.router.text.preparation import PreparedRequest
from tgi_server.router.text.token_stream import AnyStream, CollectedTokens, Formatter, OnEnd, TokenStream

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_CHATS = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/messages"})
# Of members that are ignored: those of one request that are reported, and names that are logged.
_MOST_NAMES, _MOST_LOGGED = 10, 1000
_INDEX = re.compile(r"\[\d+\]")
# Of a stream: that a client who reads may have before it.
_UNREAD_BYTES = 65_536

# Of a token that is embedded or ranked, and of a number that comes of it: as bytes, as an object, and in JSON.
_INPUT_BYTES, _VALUE_BYTES = 16, 24
_NUMBER_CHARACTERS = 12

# Seconds for which a prompt with a `prompt_cache_key` is held, as OpenAI does.
_KEPT_SECONDS = 300.0

# Of a token in an answer that is held as a whole, and of each alternative to it.
_TOKEN_BYTES, _ALTERNATIVE_BYTES = 320, 200
# Of a sequence, and of a token of its prompt until the sequence ends: a number in a list, one for the scheduler, and
# the number itself where no other sequence has it.
_SEQUENCE_BYTES, _PROMPT_BYTES, _NUMBER_BYTES = 3_000, 12, 32

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
F = TypeVar("F", bound=Formatter)
Fields = dict[str, str | int | float]  # of a line of the log, or of a span


class Exchange:
    """A request's places among those in flight, its clock, its span, and the sequences generated for it.

    Every exchange that was opened is closed once: then its unfinished sequences are cancelled, its places given
    back, and its metrics and its log line written. refusal: why the server cancelled it, which is its answer.
    """

    def __init__(self, service: Service, request: Request) -> None:
        """size: bytes of the body, once it is there. read_tokens: of texts that are embedded or ranked."""
        self.service = service
        self.request = request
        self.path: str = request.scope["path"]
        self.tenant = tenant_of(request)
        self._key = key_of(request)
        self.owner = owner_of(request)
        self.arrived = perf_counter()
        self._time_limits = TimeLimits.of(request.headers)
        self.span = service.tracer.start(self.path, request.headers)
        self.request_id = request_id(request)
        self._sequences: list[tuple[int, AnyStream]] = []
        self._places = 0
        self._unenforced: list[str] = []
        self._reading: list[str] = []
        self._ignored: list[str] = []
        self._adapters: set[str | None] = set()
        self.size = 0
        self._closed = False
        self._streams = False
        self._requested: Fields = {}
        self.read_tokens = 0
        self._computes_values = False  # in place of text
        # Bytes that a token of the prompt takes while the sequence runs, and until it is shown; and one of the answer.
        self._token_bytes: list[tuple[int, int, int]] = []
        self._last_prompt: list[int] = []
        self._outbox: Outbox | None = None
        self._progress = ""  # of what was cancelled
        self._collects = True
        self._task = asyncio.current_task()
        self.refusal: RouterError | None = None
        self.lease = lease_of(request.scope)
        self.lease.answer, self.lease.end = self._answer_bytes, self._end

    async def body(self) -> bytes:
        """Returns what the client sent. From then on the request has a place among those in flight.

        Raises Overloaded when as many are in flight as may be.
        """
        self.service.metrics.requests.received()
        body = await read_body(self.request, self.service.policy.payload_limit)
        self.size = len(body)
        self.reserve(1)
        return body

    def reserve(self, places: int) -> None:
        """Takes further places, for a request that needs several sequences. Raises Overloaded."""
        self.service.capacity.take(places, self.owner)
        self._places += places

    def release(self) -> None:
        """Ends what is still generated and gives the places back, though the answer may not have been read."""
        for request_id, stream in self._sequences:
            if stream.finish_reason is None:
                self._progress = self.service.submitter.cancel(request_id) or self._progress
        self.service.capacity.give_back(self._places, self.owner)
        self._places = 0

    async def read(self, model: type[M]) -> M:
        """Returns the body as `model`. Raises InvalidRequest; Overloaded when as many are in flight as may be."""
        body = await self.body()
        threads = self.service.text.threads
        content = await threads.handle_text(len(body), lambda: self._validated(model, body), at_once=SMALL)
        self.lease.give_back(self.size)  # only what it became is held from here on
        return content

    def _validated(self, model: type[M], body: bytes) -> M:
        """Returns the body as `model`, with a note of what is ignored.

        Raises InvalidRequest; with --strict-fields also for these.
        """
        policy, content = self.service.policy, read_json(body)
        checked = validate(model, content)
        for each in islice(ignored(checked, content), _MOST_NAMES):
            if policy.strict_fields:
                raise InvalidRequest.at(each.path, each.fault)
            self._ignored.append(f"{each.path} ({each.note})" if each.note else each.path)
            name = _INDEX.sub("[]", each.path)
            if name not in policy.ignored_fields and len(policy.ignored_fields) < _MOST_LOGGED:
                policy.ignored_fields.add(name)
                logger.warning("%s: `%s` is ignored: it %s", self.path, each.path, each.fault)
        return checked

    def generate(
        self,
        checked: PreparedRequest,
        output: F,
        on_end: OnEnd,
        *,
        shown: Collection[int] = (),
        keep: KeptPrefix | None = None,
    ) -> TokenStream[F]:
        """Queues a sequence, which `output` writes. shown: special tokens that are part of the text.

        keep: its prompt stays in the prefix cache; None: if it has a `prompt_cache_key`.

        Raises InvalidRequest for a class that the caller may not use.
        """
        service, options = self.service, checked.options
        self._check_priority(options.priority)
        if keep is None and options.prompt_cache_key is not None:
            keep = KeptPrefix(options.prompt_cache_key, _KEPT_SECONDS)
        self._note_unenforced(checked.unenforced)
        if (grammar := options.grammar) is not None and grammar.reading:
            self._reading = [grammar.reading]
        stream = TokenStream(
            service.text.tokenizer,
            checked.input_ids,
            checked.stop_sequences,
            output,
            on_end,
            stop_ids=frozenset(options.stop_token_ids),
            min_tokens=options.sampling.min_tokens,
            shown=shown if options.skip_special_tokens else service.text.tokenizer.special_tokens,
            observe_gap=service.metrics.requests.gap,
        )
        request_id = next(service.request_ids)
        self._sequences.append((request_id, stream))
        report = options.report
        shared = checked.input_ids is self._last_prompt or bool(report.scored_token_ids)
        self._last_prompt = checked.input_ids
        self._token_bytes.append(
            (
                _PROMPT_BYTES + (0 if shared else _NUMBER_BYTES),
                (_TOKEN_BYTES + _ALTERNATIVE_BYTES * report.prefill_top_n) * report.prefill_logprobs,
                _TOKEN_BYTES + _ALTERNATIVE_BYTES * report.top_n_tokens,
            )
        )
        service.metrics.requests.validated(len(checked.input_ids), options.stopping.max_new_tokens)
        self._requested = {
            "gen_ai.request.model": options.adapter_id or service.model.names[0],
            "gen_ai.request.max_tokens": options.stopping.max_new_tokens,
            "gen_ai.request.temperature": options.sampling.temperature if options.sampling.do_sample else 0.0,
        }
        if options.adapter_id not in self._adapters:
            self._adapters.add(options.adapter_id)
            service.metrics.requests.computed_by(options.adapter_id)
        streams = isinstance(on_end, StreamEnd)
        deadline, first_token_by = self._time_limits.deadlines(self.arrived, options.timeout_ms, streams=streams)
        service.submitter.submit(
            ValidRequest(
                id=request_id,
                input_ids=checked.input_ids,
                options=options,
                sink=stream,
                cache_namespace=cache_namespace(self.tenant, options.cache_salt),
                trace_context=service.tracer.context(self.span),
                deadline=deadline,
                first_token_by=first_token_by,
                tenant=self.tenant,
                weight=1.0 if self._key is None else self._key.weight,
                keep=keep,
                images=checked.images,
            )
        )
        return stream

    def _check_priority(self, priority: int) -> None:
        allowed = None if self._key is None else self._key.max_priority
        lowest = self.service.policy.max_priority if allowed is None else allowed
        if priority < lowest:
            raise InvalidRequest.at(
                "priority",
                f"is {priority}; the lowest that {'this key' if self._key else 'a request'} may give is "
                f"{lowest} (--max-priority)",
            )

    def _answer_bytes(self) -> int:
        """Returns roughly the bytes of the answers that are generated and not sent."""
        size = 0 if self._outbox is None else self._outbox.waiting
        for (_, stream), (running, shown, generated) in zip(self._sequences, self._token_bytes, strict=True):
            prompt = shown + (running if stream.finish_reason is None else 0)
            size += _SEQUENCE_BYTES + prompt * stream.input_length
            size += generated * stream.generated_tokens * self._collects
        return size

    def _end(self, error: RouterError) -> bool:
        """Ends the request with an error. Returns False if its body still comes, or its client does not read."""
        if self._closed or self._task is None or not self.size:
            return False
        if not self._streams:
            self.refusal = error
            return self._task.cancel()
        running = [stream for _, stream in self._sequences if stream.finish_reason is None]
        if not running or (self._outbox is not None and self._outbox.waiting > _UNREAD_BYTES):
            return False
        running[0].failed(error)
        return True

    def _note_unenforced(self, constraints: Sequence[str]) -> None:
        """Takes note of constraints that are left to the model, for the response's headers and the log."""
        new = [each for each in constraints if each not in self._unenforced]
        if new:
            self._unenforced += new
            logger.info("%s: constraints are left to the model: %s", self.path, shortened(new))

    async def collect(self, requests: Sequence[PreparedRequest]) -> list[TokenStream[CollectedTokens]]:
        """Generates one sequence for each request, all at once, and returns them once all have ended.

        Raises GenerationFailed, or ClientGone.
        """
        end = AllEnded(len(requests))
        streams = [self.generate(checked, CollectedTokens(), end) for checked in requests]
        await self.wait_for(end.future)
        return streams

    async def wait_for(self, future: asyncio.Future[T]) -> T:
        """Returns the result of `future`. Raises ClientGone as soon as the client closes its connection."""

        def give_up(_: asyncio.Task[None]) -> None:
            if not future.done():
                future.set_exception(ClientGone("the client disconnected"))

        watcher = asyncio.ensure_future(_disconnected(self.request))
        watcher.add_done_callback(give_up)
        try:
            return await future
        finally:
            watcher.remove_done_callback(give_up)
            watcher.cancel()

    def respond(self, content: Any, *, characters: int, streams: Sequence[AnyStream]) -> Response:
        """Returns a response in one piece. content: an object, or JSON. characters: of the prompts. streams: the
        sequences that it shows.
        """
        headers = timing_headers(
            self.service.model.compute_type,
            self.times(),
            characters=characters,
            prompt_tokens=sum(stream.input_length for stream in streams),
            generated_tokens=sum(stream.generated_tokens for stream in streams),
        )
        if len(streams) == 1 and (reason := streams[0].finish_reason) is not None:
            headers["x-finish-reason"] = reason.value
        return json_response(content, headers | self._notes())

    def encoder(self, task: str, model: str | None) -> ServedEncoder:
        """Returns the model that embeds or ranks. model: its name in the request. Raises NoSuchModel."""
        generating = self.service.model.names if self.service.generates else ()
        found = self.service.encoders.get(task, model, generating)
        self._requested = {"gen_ai.request.model": found.name}
        return found

    async def unless_left(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns what `work` returns. Cancels it as soon as the client closes its connection. Raises ClientGone."""
        return await unless_left(self.request, work)

    async def encode(self, encoder: ServedEncoder, inputs: Sequence[pb.EncodeInput], **options: Any) -> Values:
        """Returns what the model computes for texts, whose memory is counted. options: of `ServedEncoder.values`.

        Raises ClientGone, Overloaded, PayloadTooLarge and Unhealthy.
        """
        self.read_tokens = sum(len(each.ids) for each in inputs)
        columns = min(options.get("dimensions") or encoder.info.columns, encoder.info.columns)
        self.lease.hold(_INPUT_BYTES * self.read_tokens + _VALUE_BYTES * len(inputs) * columns)
        return await self.unless_left(encoder.values(inputs, **options))

    async def respond_with_values(self, make: Callable[[], Any], *, size: int) -> Response:
        """Returns the response to a request that generates nothing: what `make` returns, in a thread.

        size: numbers that it has.
        """
        content = await self.service.text.threads.handle_text(_NUMBER_CHARACTERS * size, lambda: to_json(make()))
        self._computes_values = True
        total = f"{(perf_counter() - self.arrived) * 1000:.0f}"
        headers = {"x-compute-type": self.service.model.compute_type, "x-total-time": total}
        return json_response(content, headers | {"x-prompt-tokens": str(self.read_tokens)} | self._notes())

    async def respond_with_tokens(self, content: Any, tokens: int) -> Response:
        """Returns the response to a request that only has tokens counted. tokens: those of the text."""
        self.read_tokens = tokens
        return await self.respond_with_values(lambda: content, size=tokens)

    def respond_with_text(self, text: str) -> Response:
        """Returns the response, in plain text, to a request that only changes the server."""
        self._computes_values = True
        return PlainTextResponse(text, headers=self._notes())

    def stream_end(
        self,
        outbox: Outbox,
        *,
        sequences: int = 1,
        last_words: Callable[[], bytes] = bytes,
        trailer: bytes = b"",
    ) -> StreamEnd:
        """Returns what is reported at the end of each sequence; after the last one nothing more is generated."""
        return StreamEnd(outbox, self.path, self.release, sequences, last_words, trailer)

    def stream(self, outbox: Outbox, *, characters: int, collects: bool = False) -> EventStream:
        """Returns the response that sends what is written into `outbox`; at its end the exchange is closed.

        characters: of the prompts. collects: the answer is held as a whole until its end.

        Raises the error of a sequence that has failed already, so that the response has its status.
        """
        if outbox.error is not None:
            raise outbox.error
        self._streams, self._outbox, self._collects = True, outbox, collects
        headers = compute_headers(self.service.model.compute_type, characters=characters)
        return EventStream(outbox, headers | self._notes(), self.close)

    def _notes(self) -> dict[str, str]:
        """Returns headers with the request's id and what is to be known of how it was read."""
        notes = {
            "x-unenforced-constraints": self._unenforced,
            "x-ignored-fields": self._ignored,
            "x-schema-reading": self._reading,
        }
        return {"x-request-id": self.request_id} | {name: shortened(lines) for name, lines in notes.items() if lines}

    @property
    def _slowest(self) -> AnyStream:
        """The sequence that the client waited for longest."""
        return max((stream for _, stream in self._sequences), key=lambda stream: stream.ended_at)

    def times(self) -> RequestTimes:
        """Returns where the time went."""
        slowest = self._slowest
        inference = slowest.ended_at - slowest.started_at
        return RequestTimes(
            total=perf_counter() - self.arrived,
            validation=slowest.queued_at - self.arrived,
            queue=slowest.started_at - slowest.queued_at,
            inference=inference,
            per_token=inference / max(slowest.generated_tokens, 1),
            first_token=min(stream.first_token_at for _, stream in self._sequences) - self.arrived,
        )

    def responded(self) -> None:
        """Closes the exchange, unless the response is a stream, which has its end before it."""
        if not self._streams:
            self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Ends everything; later calls do nothing. error: why the request was not answered as it should be."""
        if self._closed:
            return
        self._closed = True
        self.release()
        if error is None and self._sequences:
            self._succeeded()
        elif error is None and self._computes_values:
            self._answered(self.read_tokens)
        else:
            self._failed(error)

    def _succeeded(self) -> None:
        times = self.times()
        generated = sum(stream.generated_tokens for _, stream in self._sequences)
        self.service.metrics.requests.succeeded(times, generated)
        prompt_tokens = sum(stream.input_length for _, stream in self._sequences)
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
        logger.info("%s answered", self.path, extra=fields | self._identity(200))
        slowest = self._slowest
        self.service.tracer.phases(
            self.span,
            {
                "validation": (self.arrived, slowest.queued_at),
                "queue": (slowest.queued_at, slowest.started_at),
                "inference": (slowest.started_at, slowest.ended_at),
            },
        )
        # OpenTelemetry's semantic conventions for generative AI.
        conventional: dict[str, str | int | float | Sequence[str]] = {
            "gen_ai.operation.name": "chat" if self.path in _CHATS else "text_completion",
            "gen_ai.provider.name": "oatmill",
            "gen_ai.response.model": self._requested["gen_ai.request.model"],
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.output_tokens": generated,
            "gen_ai.response.finish_reasons": [
                stream.finish_reason.value for _, stream in self._sequences if stream.finish_reason is not None
            ],
        }
        self.service.tracer.end(self.span, {**fields, **conventional, **self._requested}, None)

    def _answered(self, tokens: int) -> None:
        """Notes the end of a request that generates nothing. tokens: that were read."""
        seconds = perf_counter() - self.arrived
        self.service.metrics.requests.answered(seconds, tokens)
        fields: Fields = {"total_time": Milliseconds.of(seconds), "prompt_tokens": tokens}
        logger.info("%s answered", self.path, extra=fields | self._identity(200))
        self.service.tracer.end(self.span, {**fields, **self._requested, "gen_ai.usage.input_tokens": tokens}, None)

    def _identity(self, status: int) -> Fields:
        """Returns the fields that identify the request in its log line."""
        fields: Fields = {"request_id": self.request_id, "status": status, "model": self.service.model.names[0]}
        if adapters := sorted(filter(None, self._adapters)):
            fields["adapter"] = ",".join(adapters)
        if trace_id := self.service.tracer.trace_id(self.span):
            fields["trace_id"] = trace_id
        return fields

    def _failed(self, error: BaseException | None) -> None:
        if isinstance(error, asyncio.CancelledError):  # requests are cancelled when the time to finish them is up
            error = GenerationFailed("the server is shutting down")
        told = error if isinstance(error, RouterError) else ClientGone("the client disconnected")
        message = shown_message(told, self.path)
        self.service.metrics.requests.failed(told.error_type)
        status = shown_status(told, self.path)
        fault = (status >= 500 or status == 424) and not isinstance(told, RequestTimedOut | CannotBeInTime)
        raised = self.service.policy.is_local  # the program learns of its own mistakes by exceptions
        level = logging.ERROR if fault else logging.INFO if raised else logging.WARNING
        fields: Fields = {"error_type": told.error_type, "total_time": Milliseconds.of(perf_counter() - self.arrived)}
        logger.log(
            logging.INFO if isinstance(told, ClientGone) else level,
            "%s failed: %s",
            self.path,
            f"{message}; {self._progress}" if isinstance(told, ClientGone) and self._progress else message,
            extra=fields | self._identity(status),
            exc_info=told.__cause__ if type(told) is RouterError else None,
        )
        self.service.tracer.end(self.span, {**fields, "error.type": told.error_type, **self._requested}, message)


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
            self.future.exception()  # nobody may wait for it any more
        elif not self._open:
            self.future.set_result(None)


def request_id(request: Request) -> str:
    """Returns the caller's `x-request-id`, or a new one; the response and the log have it."""
    if not hasattr(request.state, "request_id"):
        given = request.headers.get("x-request-id", "")
        request.state.request_id = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
    found: str = request.state.request_id
    return found


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Returns what `work` returns. Cancels it as soon as the client closes its connection, and waits for its end, so
    that the request keeps its place until then. Raises ClientGone.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone("the client disconnected")
        return task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.wait((task,))


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def owner_of(request: Request) -> str:
    """Returns the owner of the request: its API key if there are several, or else its address."""
    return tenant_of(request) or (network_of(request.client.host) if request.client is not None else "")


async def respond(service: Service, request: Request, handle: Callable[[Exchange], Awaitable[Response]]) -> Response:
    """Returns what `handle` makes of the request. A stream goes on after it, and then closes the exchange.

    Raises RouterError.
    """
    exchange = Exchange(service, request)
    try:
        response = await handle(exchange)
    except asyncio.CancelledError as error:
        exchange.close(exchange.refusal or error)
        if exchange.refusal is None or (task := asyncio.current_task()) is None:
            raise
        task.uncancel()
        raise exchange.refusal from None
    except RouterError as error:
        exchange.close(error)
        raise
    except Exception as fault:
        failure = RouterError("the server failed to handle the request")
        failure.__cause__ = fault
        exchange.close(failure)
        raise failure from None
    exchange.responded()
    return response


async def respond_to(
    service: Service, request: Request, model: type[M], handle: Callable[[Exchange, M], Awaitable[Response]]
) -> Response:
    """Returns what `handle` makes of the request, whose body is a `model`. Raises RouterError."""

    async def read_and_handle(exchange: Exchange) -> Response:
        return await handle(exchange, await exchange.read(model))

    return await respond(service, request, read_and_handle)


class DirectRoute(APIRoute):
    """Hands the request to the endpoint as it is: FastAPI's own work on each request would cost more than ours.

    The endpoint takes a Request and returns a Response; its models are named for the API's description only.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint


class Milliseconds(float):
    """A duration in milliseconds: a number in JSON logs, with its unit in text logs."""

    @classmethod
    def of(cls, seconds: float) -> "Milliseconds":
        return cls(round(seconds * 1000, 3))

    def __str__(self) -> str:
        return f"{float(self):.3f}ms"

    def __format__(self, _: str) -> str:
        return str(self)
