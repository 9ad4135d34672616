"""What happens around every call of an application: the limit of calls, metrics, traces, errors to statuses."""

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
from opentelemetry import trace

from llm_functionalities.caller import Context
from llm_functionalities.errors import InvalidGrammar
from llm_functionalities.metrics import Metrics
from shared.tracing import extract_context

logger = logging.getLogger(__name__)

UNLIMITED = ("/grpc.health.", "/grpc.reflection.")
"""Services that answer however busy this one is."""

Handler: TypeAlias = grpc.RpcMethodHandler


class Admission(grpc.aio.ServerInterceptor):
    """Lets at most `limit` calls in at a time; more are refused with RESOURCE_EXHAUSTED."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit = limit
        self._metrics = metrics
        self._running = 0
        self._tracer = trace.get_tracer(__name__)
        self._wrapped: dict[str, Handler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = details.method
        if (wrapped := self._wrapped.get(method)) is not None:
            return wrapped
        handler = await continuation(details)
        if handler is None or method.startswith(UNLIMITED):
            return handler
        self._wrapped[method] = wrapped = self._wrap(method, handler)
        return wrapped

    def _wrap(self, method: str, handler: Handler) -> Handler:
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        behaviour = self._streaming(method, handler) if handler.response_streaming else self._unary(method, handler)
        return make(behaviour, handler.request_deserializer, handler.response_serializer)

    def _unary(self, method: str, handler: Handler) -> Callable[[Any, Context], Awaitable[Any]]:
        answer = handler.unary_unary

        async def admitted(request: Any, context: Context) -> Any:
            await self._admit(method, context)
            with self._call(method, context):
                try:
                    return await answer(request, context)
                except InvalidGrammar as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

        return admitted

    def _streaming(self, method: str, handler: Handler) -> Callable[[Any, Context], AsyncIterator[Any]]:
        answer = handler.unary_stream

        async def admitted(request: Any, context: Context) -> AsyncIterator[Any]:
            await self._admit(method, context)
            with self._call(method, context):
                try:
                    async for part in answer(request, context):
                        yield part
                except InvalidGrammar as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

        return admitted

    async def _admit(self, method: str, context: Context) -> None:
        if self._running >= self._limit:
            self._metrics.calls.labels(method, "RESOURCE_EXHAUSTED").inc()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._limit} calls are under way; try again")

    @contextmanager
    def _call(self, method: str, context: Context) -> Iterator[None]:
        self._running += 1
        self._metrics.running.inc()
        started = time.monotonic()
        status = "OK"
        try:
            with self._tracer.start_as_current_span(
                method.removeprefix("/"), extract_context(_text_metadata(context)), trace.SpanKind.SERVER
            ):
                yield
        except grpc.aio.AbortError:
            status = "INVALID_ARGUMENT"
            raise
        except Exception:
            status = "INTERNAL"
            logger.exception("%s failed; this is a fault of the service", method)
            raise
        except BaseException:
            status = "CANCELLED"
            raise
        finally:
            self._running -= 1
            self._metrics.running.dec()
            self._metrics.calls.labels(method, status).inc()
            self._metrics.seconds.labels(method).observe(time.monotonic() - started)


def _text_metadata(context: Context) -> dict[str, str]:
    metadata = context.invocation_metadata() or ()
    return {key: value for key, value in metadata if isinstance(value, str)}
