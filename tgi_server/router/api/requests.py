"""One client's request, from its arrival to the last byte of its response."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from tgi_server.contract import ReportParameters, StoppingParameters
from tgi_server.router.api.access import cache_namespace, tenant_of
from tgi_server.router.api.body import parse, read_beside_loop, read_body
from tgi_server.router.api.event_stream import EventStream
from tgi_server.router.errors import ClientGone, RouterError
from tgi_server.router.metrics import RequestTimes
from tgi_server.router.request import ValidRequest
from tgi_server.router.service import Service
from tgi_server.router.text.token_stream import CollectingSink, SequenceSink
from tgi_server.router.text.validation import CheckedRequest

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Exchange:
    """Holds a request's places among those in flight, its clock, its span, and the sequences generated for it.

    Every exchange that was opened is closed once: then its unfinished sequences are cancelled, its places given
    back, and its metrics and its log line written.
    """

    def __init__(self, service: Service, request: Request) -> None:
        """size: bytes of the body, once it is there."""
        self.service = service
        self.request = request
        self.path: str = request.scope["path"]
        self.arrived = perf_counter()
        self.span = service.tracer.start(self.path, request.headers)
        self._sequences: list[tuple[int, SequenceSink]] = []
        self._places = 0
        self.size = 0
        self._closed = False

    async def body(self) -> bytes:
        """What the client sent. From then on the request has a place among those in flight.

        Raises Overloaded when as many are in flight as may be.
        """
        self.service.metrics.requests.received()
        body = await read_body(self.request, self.service.payload_limit)
        self.size = len(body)
        self.reserve(1)
        return body

    def reserve(self, places: int) -> None:
        """Takes further places, for a request that needs several sequences. Raises Overloaded."""
        self.service.capacity.take(places)
        self._places += places

    def release(self) -> None:
        """Ends what is still generated and gives the places back, though the answer may not have been read."""
        for request_id, sink in self._sequences:
            if sink.finish_reason is None:
                self.service.submitter.cancel(request_id)
        self.service.capacity.give_back(self._places)
        self._places = 0

    async def read(self, model: type[M]) -> M:
        """The body as `model`. Raises InvalidRequest; Overloaded when as many are in flight as may be."""
        return await self.read_by(partial(parse, model))

    async def read_by(self, read: Callable[[bytes], T]) -> T:
        """What `read` makes of the body. Raises InvalidRequest; Overloaded when as many are in flight as may be."""
        return await read_beside_loop(self.service.threads, await self.body(), read)

    def submit(self, checked: CheckedRequest, sink: SequenceSink, *, logprobs: bool) -> None:
        """Queues a sequence; its tokens go to `sink`."""
        service = self.service
        request_id = next(service.request_ids)
        self._sequences.append((request_id, sink))
        service.metrics.requests.validated(len(checked.input_ids), checked.max_new_tokens)
        service.submitter.submit(
            ValidRequest(
                id=request_id,
                input_ids=checked.input_ids,
                stopping=StoppingParameters(checked.max_new_tokens, checked.ignore_eos),
                sink=sink,
                sampling=checked.sampling,
                report=ReportParameters(logprobs, checked.top_n_tokens, checked.prefill_logprobs),
                grammar=checked.grammar,
                cache_namespace=cache_namespace(tenant_of(self.request.scope), checked.cache_salt),
                trace_context=service.tracer.context(self.span),
            )
        )

    def cancel(self, sink: SequenceSink) -> None:
        """Forgets one sequence."""
        for request_id, each in self._sequences:
            if each is sink:
                self.service.submitter.cancel(request_id)
        self._sequences = [pair for pair in self._sequences if pair[1] is not sink]

    @property
    def _slowest(self) -> SequenceSink:
        """Of several sequences, the one that the client waited for."""
        return max((sink for _, sink in self._sequences), key=lambda sink: sink.ended_at)

    def times(self) -> RequestTimes:
        """Where the time went."""
        slowest = self._slowest
        inference = slowest.ended_at - slowest.started_at
        return RequestTimes(
            total=perf_counter() - self.arrived,
            validation=slowest.queued_at - self.arrived,
            queue=slowest.started_at - slowest.queued_at,
            inference=inference,
            per_token=inference / max(slowest.generated_tokens, 1),
        )

    def close(self, error: BaseException | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self.release()
        if error is None and self._sequences:
            self._succeeded()
        else:
            self._failed(error)

    def _succeeded(self) -> None:
        times = self.times()
        generated = sum(sink.generated_tokens for _, sink in self._sequences)
        self.service.metrics.requests.succeeded(times, generated)
        fields: dict[str, str | int | float] = {
            "total_time": _milliseconds(times.total),
            "validation_time": _milliseconds(times.validation),
            "queue_time": _milliseconds(times.queue),
            "inference_time": _milliseconds(times.inference),
            "time_per_token": _milliseconds(times.per_token),
            "prompt_tokens": sum(sink.input_length for _, sink in self._sequences),
            "generated_tokens": generated,
        }
        logger.info("%s answered", self.path, extra=fields)
        slowest = self._slowest
        self.service.tracer.phases(
            self.span,
            {
                "validation": (self.arrived, slowest.queued_at),
                "queue": (slowest.queued_at, slowest.started_at),
                "inference": (slowest.started_at, slowest.ended_at),
            },
        )
        self.service.tracer.end(self.span, fields, None)

    def _failed(self, error: BaseException | None) -> None:
        told = error if isinstance(error, RouterError) else ClientGone("the client left")
        self.service.metrics.requests.failed(told.error_type)
        level = logging.ERROR if told.status in (424, 500) else logging.INFO
        fields = {"error_type": told.error_type, "total_time": _milliseconds(perf_counter() - self.arrived)}
        logger.log(level, "%s failed: %s", self.path, told, extra=fields)
        self.service.tracer.end(self.span, fields, str(told))


async def answer(service: Service, request: Request, handle: Callable[[Exchange], Awaitable[Response]]) -> Response:
    """Runs `handle` in an exchange. A stream goes on after it, and closes the exchange itself.

    Raises RouterError.
    """
    exchange = Exchange(service, request)
    try:
        response = await handle(exchange)
    except asyncio.CancelledError as error:
        exchange.close(error)
        raise
    except RouterError as error:
        exchange.close(error)
        raise
    except Exception:
        logger.exception("%s could not be handled", exchange.path)
        failure = RouterError("the server failed to handle the request")
        exchange.close(failure)
        raise failure from None
    if not isinstance(response, EventStream):
        exchange.close()
    return response


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.3f}ms"


def stream_headers(exchange: Exchange, *, characters: int) -> dict[str, str]:
    """What is known before the first token. characters: of the prompts."""
    return {"x-compute-type": exchange.service.model.compute_type, "x-compute-characters": str(characters)}


def timing_headers(exchange: Exchange, *, characters: int, sinks: Sequence[SequenceSink]) -> dict[str, str]:
    """`sinks`: the sequences that the answer shows. Times are in milliseconds, but for `x-compute-time` (seconds)."""
    times = exchange.times()
    return {
        **stream_headers(exchange, characters=characters),
        "x-compute-time": f"{times.total:.6f}",
        "x-total-time": _whole_milliseconds(times.total),
        "x-validation-time": _whole_milliseconds(times.validation),
        "x-queue-time": _whole_milliseconds(times.queue),
        "x-inference-time": _whole_milliseconds(times.inference),
        "x-time-per-token": _whole_milliseconds(times.per_token),
        "x-prompt-tokens": str(sum(sink.input_length for sink in sinks)),
        "x-generated-tokens": str(sum(sink.generated_tokens for sink in sinks)),
    }


def _whole_milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))


async def unless_client_leaves(exchange: Exchange, future: asyncio.Future[T]) -> T:
    """The result of `future`. Raises ClientGone as soon as the client closes its connection."""

    def give_up(_: asyncio.Task[None]) -> None:
        if not future.done():
            future.set_exception(ClientGone("the client left"))

    watcher = asyncio.ensure_future(_disconnected(exchange))
    watcher.add_done_callback(give_up)
    try:
        return await future
    finally:
        watcher.remove_done_callback(give_up)
        watcher.cancel()


async def _disconnected(exchange: Exchange) -> None:
    while (await exchange.request.receive())["type"] != "http.disconnect":
        pass


class _Ending:
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
        elif not self._open:
            self.future.set_result(None)


async def collect(
    exchange: Exchange, requests: Sequence[CheckedRequest], *, reveal_stop: bool, logprobs: bool
) -> list[CollectingSink]:
    """Generates one sequence for each request, all at once, and waits for all of them.

    reveal_stop: whether a stop sequence is part of the text that it ends.

    Raises GenerationFailed, or ClientGone.
    """
    ending = _Ending(len(requests))
    tokenizer = exchange.service.tokenizer
    sinks: list[CollectingSink] = []
    for checked in requests:
        sink = CollectingSink(tokenizer, checked.input_ids, checked.stop_sequences(reveal=reveal_stop), ending)
        sinks.append(sink)
        exchange.submit(checked, sink, logprobs=logprobs)
    await unless_client_leaves(exchange, ending.future)
    return sinks


class DirectRoute(APIRoute):
    """Hands the request to the endpoint as it is: FastAPI's own work on each request would cost more than ours.

    The endpoint takes a Request and returns a Response; its models are named for the API's description only.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        return self.endpoint
