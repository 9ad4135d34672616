"""Wraps every method of the gRPC server: limits calls, reports metrics and traces, and turns errors into statuses.

A call is admitted before its message is received, so memory never holds more messages than calls may run. This is why
messages are parsed here and not by gRPC.
"""

import asyncio
import logging
import re
import time
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager, suppress
from typing import Any, TypeAlias
from uuid import uuid4

import grpc
from google.protobuf.message import DecodeError
from opentelemetry import trace

from llm_functionalities.endpoint.call import REQUEST_ID
from llm_functionalities.errors import CallerGone, CallRefused, InvalidArgument, ServiceFailed, TooBusy, TooSlow
from llm_functionalities.metrics import ServiceMetrics
from llm_functionalities.services.context import MODELS, CallContext
from llm_functionalities.services.message_bounds import check_fields
from shared.stubs import llm_pb2
from shared.tracing import extract_context, trace_headers

logger = logging.getLogger(__name__)

Rpc: TypeAlias = grpc.aio.ServicerContext
Handler: TypeAlias = grpc.RpcMethodHandler
Behaviour: TypeAlias = Callable[[Any, Rpc], Awaitable[Any]]

HEALTH_CHECK = "/grpc.health.v1.Health/Check"

# These services have a limit of their own, so that they respond however busy the others are.
ABOUT_THE_SERVER = ("/grpc.health.", "/grpc.reflection.")

# Embeddings of different models cannot be compared, so a single model answers these calls.
ONE_VECTOR_SPACE = "/LLMEmbeddings/"

# The most health checks at a time, and the most streams of health and reflection at a time, which may last long.
MAX_CHECKS = 64
MAX_WATCHERS = 64

# A stream whose caller does not read ends this long after its deadline.
UNREAD_SECONDS = 1.0

# A connection that cancels MOST_CANCELLED calls in a row within CANCELLED_SECONDS is refused for as long.
MOST_CANCELLED = 1000
CANCELLED_SECONDS = 10.0

# The most connections whose cancelled calls are counted.
MOST_CONNECTIONS = 4096

# A request id that is accepted from the caller: it can be sent on as an HTTP header.
_USABLE_ID = re.compile(r"[!-~]{1,128}")

_REQUESTS = {
    f"/{service.full_name}/{method.name}": method.input_type
    for service in llm_pb2.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


class ConcurrencyLimit:
    """Counts running calls, and refuses those beyond `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0

    @contextmanager
    def place(self) -> Iterator[None]:
        """Counts a call as running while the context is entered. Raises TooBusy at the limit."""
        if self.taken >= self.limit:
            raise TooBusy(f"{self.limit} calls are running, which is the maximum; try again later")
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1


class CancelledCalls:
    """Refuses the calls of a connection for CANCELLED_SECONDS after it has cancelled very many in a row.

    A cancelled call is no longer counted as running, so the limit of running calls does not bound them.
    """

    def __init__(self) -> None:
        # For each connection: the number of cancelled calls in a row, and the time until which they count.
        self._in_a_row: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def check(self, connection: str) -> None:
        """Raises TooBusy if the connection is refused at the moment."""
        count, until = self._in_a_row.get(connection, (0, 0.0))
        if count >= MOST_CANCELLED and time.monotonic() < until:
            raise TooBusy(f"this connection has cancelled {count} calls in a row; try again in {CANCELLED_SECONDS:g} s")

    def cancelled(self, connection: str) -> None:
        count, until = self._in_a_row.pop(connection, (0, 0.0))
        now = time.monotonic()
        if now >= until:
            count, until = 0, now + CANCELLED_SECONDS
        elif count + 1 == MOST_CANCELLED:
            until = now + CANCELLED_SECONDS
            logger.warning("a connection is refused: it has cancelled %d calls in a row", count + 1)
        self._in_a_row[connection] = count + 1, until
        if len(self._in_a_row) > MOST_CONNECTIONS:
            self._in_a_row.popitem(last=False)

    def ended(self, connection: str) -> None:
        self._in_a_row.pop(connection, None)


class CallAdmission(grpc.aio.ServerInterceptor):
    """Admits at most `limit` calls at a time, and refuses more with RESOURCE_EXHAUSTED.

    max_entries: the most entries of each list in a request. receive_timeout: seconds in which a request's message has
    to arrive. models: names of models that calls may give. ladder: the models for calls that give none, from the
    largest to the smallest.
    """

    def __init__(
        self,
        limit: int,
        metrics: ServiceMetrics,
        *,
        max_entries: int,
        receive_timeout: float,
        models: Collection[str] = (),
        ladder: Sequence[str] = (),
    ) -> None:
        self._calls = ConcurrencyLimit(limit)
        self._checks = ConcurrencyLimit(MAX_CHECKS)
        self._watchers = ConcurrencyLimit(MAX_WATCHERS)
        self._cancelled = CancelledCalls()
        self._metrics = metrics
        self._max_entries = max_entries
        self._receive_timeout = receive_timeout
        self._models = models
        self._ladder = ladder
        self._tracer = trace.get_tracer(__name__)
        self._wrapped: dict[str, Handler] = {}
        metrics.watch_calls(lambda: self._calls.taken)

    @property
    def max_rpcs(self) -> int:
        """The number of calls that gRPC may hold: the admitted ones, and some that are being refused."""
        return self._calls.limit + self._checks.limit + self._watchers.limit + MAX_CHECKS

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = details.method
        if (wrapped := self._wrapped.get(method)) is not None:
            return wrapped
        handler = await continuation(details)
        if handler is None:
            return None
        self._wrapped[method] = wrapped = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _aborting(self._wrap_conversation(handler)), handler.request_deserializer, handler.response_serializer
            )
        behaviour = (
            self._wrap_health(method, handler)
            if method.startswith(ABOUT_THE_SERVER)
            else self._wrap_call(method, handler)
        )
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(_aborting(behaviour), None, handler.response_serializer)

    def _wrap_conversation(self, handler: Handler) -> Behaviour:
        """Wraps the method of the reflection service. gRPC reads its requests, one at a time."""

        async def admitted(requests: AsyncIterator[Any], rpc: Rpc) -> None:
            with self._watchers.place():
                async with aclosing(handler.stream_stream(requests, rpc)) as responses:
                    async for response in responses:
                        await _send(rpc, response, self._receive_timeout)

        return admitted

    def _wrap_health(self, method: str, handler: Handler) -> Behaviour:
        """Wraps a method of the health service."""
        places = self._checks if method == HEALTH_CHECK else self._watchers
        behaviour = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def admitted(_: object, rpc: Rpc) -> Any:
            with places.place():
                return await behaviour(handler.request_deserializer(await self._receive(rpc)), rpc)

        return admitted

    def _wrap_call(self, method: str, handler: Handler) -> Behaviour:
        """Wraps a method of the services of `llm.proto`."""
        kind = _REQUESTS[method]

        async def admitted(_: object, rpc: Rpc) -> Any:
            connection = rpc.peer()
            self._cancelled.check(connection)
            with self._observed(method, rpc) as context:
                message = await self._receive(rpc)
                check_fields(message, kind, self._max_entries)
                try:
                    request = handler.request_deserializer(message)
                except DecodeError as error:
                    raise InvalidArgument(f"the message is not a valid {kind.name}: {error}") from None
                del message
                response = None
                if handler.response_streaming:
                    await _stream(handler.unary_stream(request, context), context, rpc)
                else:
                    response = await handler.unary_unary(request, context)
            self._cancelled.ended(connection)
            return response

        return admitted

    async def _receive(self, rpc: Rpc) -> bytes:
        """Returns the bytes of the request's message. Raises TooSlow or InvalidArgument."""
        try:
            async with asyncio.timeout(self._receive_timeout):
                message = await rpc.read()
        except TimeoutError:
            raise TooSlow(f"the request's message did not arrive within {self._receive_timeout:g} s") from None
        if message is grpc.aio.EOF:
            raise InvalidArgument("the request has no message; send one")
        received: bytes = message
        return received

    @contextmanager
    def _observed(self, method: str, rpc: Rpc) -> Iterator[CallContext]:
        """Reserves a place for a call, and reports the call to metrics and traces."""
        started = time.monotonic()
        status = "OK"
        metadata = _text_metadata(rpc)
        request_id = _request_id(metadata)
        span = self._tracer.start_span(method.removeprefix("/"), extract_context(metadata), trace.SpanKind.SERVER)
        context = CallContext(rpc, request_id, trace_headers(span))
        try:
            context.models = self._models_of(method, metadata.get(MODELS, ""))
            with self._calls.place():
                yield context
        except CallRefused as error:
            status = error.status.name
            raise
        except Exception as error:
            status = "INTERNAL"
            span.record_exception(error)
            span.set_status(trace.StatusCode.ERROR, str(error))
            logger.exception("%s failed; this is a bug, please report it", method, extra={"request_id": request_id})
            raise ServiceFailed(
                f"internal error; the service's log has the reason under the request id {request_id}"
            ) from None
        except BaseException:
            status = "CANCELLED"
            self._cancelled.cancelled(rpc.peer())
            raise
        finally:
            span.end()
            self._metrics.calls.labels(method, status).inc()
            if status != TooBusy.status.name:
                self._metrics.seconds.labels(method).observe(time.monotonic() - started)

    def _models_of(self, method: str, named: str) -> Sequence[str]:
        """Parses `named`, the models that a call gives, separated by commas. Raises InvalidArgument.

        Returns the names of the models that may answer the call; empty: any endpoint may.
        """
        one_space = method.startswith(ONE_VECTOR_SPACE)
        if not (names := [name.strip() for name in named.split(",") if name.strip()]):
            return () if one_space else self._ladder
        if unknown := [name for name in names if name not in self._models]:
            known = (
                f"those of this service are {', '.join(self._models)}" if self._models else "--ladder-models sets none"
            )
            raise InvalidArgument(f"the metadata `{MODELS}` name {unknown[0][:100]!r}, which is not a model; {known}")
        if len(set(names)) < len(names):
            raise InvalidArgument(f"the metadata `{MODELS}` name a model twice: {', '.join(names)[:200]}")
        if one_space and len(names) > 1:
            raise InvalidArgument(
                f"the metadata `{MODELS}` name several models; give one, because numbers of different models cannot be "
                "compared"
            )
        return names


def _aborting(behaviour: Behaviour) -> Behaviour:
    """Wraps `behaviour` so that refusals become gRPC statuses."""

    async def aborting(requests: Any, rpc: Rpc) -> Any:
        try:
            return await behaviour(requests, rpc)
        except CallRefused as error:
            with suppress(grpc.aio.InternalError):  # a cancelled call needs no status
                await rpc.abort(error.status, str(error))

    return aborting


async def _stream(responses: AsyncGenerator[Any, None], context: CallContext, rpc: Rpc) -> None:
    """Sends the parts of a stream. Raises TooSlow when the caller does not read UNREAD_SECONDS after the deadline."""
    async with aclosing(responses):
        async for response in responses:
            left = max(0.0, context.deadline.remaining()) if context.deadline else 0.0
            await _send(rpc, response, left + UNREAD_SECONDS)


async def _send(rpc: Rpc, response: object, seconds: float) -> None:
    """Sends a part of a stream. Raises TooSlow if it takes longer than `seconds`, and CallerGone if the caller left."""
    try:
        async with asyncio.timeout(seconds):
            await rpc.write(response)
    except TimeoutError:
        raise TooSlow("the caller did not read the stream in time") from None
    except grpc.aio.InternalError as error:  # the caller has closed the stream
        raise CallerGone(str(error)) from None


def _request_id(metadata: Mapping[str, str]) -> str:
    """Returns the request id that the caller gives, or a new one."""
    given = metadata.get(REQUEST_ID, "")
    return given if _USABLE_ID.fullmatch(given) else uuid4().hex


def _text_metadata(rpc: Rpc) -> dict[str, str]:
    metadata = rpc.invocation_metadata() or ()
    return {key: value for key, value in metadata if isinstance(value, str)}
