"""The one way in: every POST is admitted, read as a model, handled, and answered or refused."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tgi_server.contract import GenerationOptions
from tgi_server.router.api.access import key_of, tenant_of
from tgi_server.router.api.connections import WATCH, network_of
from tgi_server.router.api.documentation import DescribedRoute, Responses, answered_by
from tgi_server.router.api.event_stream import EventStream
from tgi_server.router.api.memory import lease_of
from tgi_server.router.api.request_record import RequestRecord
from tgi_server.router.errors import ClientGone, InvalidRequest, PayloadTooLarge, RouterError, UnsupportedMediaType
from tgi_server.router.options import Dialect
from tgi_server.router.schemas.base import ResponseModel
from tgi_server.router.schemas.validation import ignored, validate
from tgi_server.router.service import Service

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

# A client that is still sending does not read an answer, so what is too much is read and thrown away, up to this.
_PATIENCE = 64 * 2**20

# In the state of a request's scope: its body, and what that is as JSON, where these have been read to choose a model.
RECEIVED = "received"

# A body of this many bytes takes less than a millisecond to read, whatever is in it.
SMALL = 8_192


class Admission:
    """A request while the server works for it. Every admission is closed once, and its record is written then.

    tenant: the name of the API key, where there are several. owner: of its places: the tenant, or else its address.
    size: bytes of the body, once it is there. on_release: called before the places are freed. refusal: why the
    request was cancelled, which is its answer: the client has left, or the server needs the memory.
    """

    def __init__(self, service: Service, request: Request) -> None:
        self.service = service
        self.request = request
        self.record = RequestRecord(service, request)
        self.tenant = tenant_of(request)
        self.key = key_of(request)
        self.owner = self.tenant or (network_of(request.client.host) if request.client is not None else "")
        self.size = 0
        self.closed = False
        self.on_release: Callable[[], None] = _nothing
        self.refusal: RouterError | None = None
        self._places = 0
        self._task = asyncio.current_task()
        self._watch = request.scope["state"][WATCH]
        self.lease = lease_of(request.scope)
        self.lease.end = self._refuse

    async def read(self, model: type[M]) -> M:
        """Returns the body as `model`. From then on the request counts as in flight, and is cancelled when its client
        leaves.

        Raises InvalidRequest; Overloaded when as many are in flight as may be.
        """
        self.service.metrics.requests.received()
        limit = self.service.policy.payload_limit
        received = self.request.scope["state"].get(RECEIVED)
        body = await read_body(self.request, limit) if received is None else received[0]
        if len(body) > limit:
            raise _too_large(limit)
        self.size = len(body)
        self.reserve(1)
        self._watch(lambda: self._refuse(ClientGone("the client disconnected")))

        def parse() -> M:
            content = read_json(body) if received is None else received[1]
            if isinstance(content, RouterError):
                raise content
            request = validate(model, content)
            self.record.note_ignored(ignored(request, content))
            return request

        request = await self.service.text.threads.handle_text(len(body), parse, at_once=SMALL)
        self.lease.give_back(self.size)  # only what it became is held from here on
        return request

    def options(
        self,
        request: BaseModel,
        dialect: Dialect,
        *,
        streams: bool = False,
        elsewhere: Mapping[str, tuple[str, Any]] | None = None,
    ) -> GenerationOptions:
        """Returns the options that a body sets. streams, elsewhere: as for `OptionReader.read`.

        Raises InvalidRequest.
        """
        of_key = None if self.key is None else self.key.max_priority
        lowest = self.service.policy.max_priority if of_key is None else of_key
        read = self.service.options.read
        return read(request, dialect, streams=streams, lowest_priority=lowest, elsewhere=elsewhere)

    def reserve(self, places: int) -> None:
        """Takes further places, for a request that needs several sequences. Raises Overloaded."""
        self.service.capacity.take(places, self.owner)
        self._places += places

    def release(self) -> None:
        """Ends what is still generated and gives the places back, though the answer may not have been read."""
        self.on_release()
        self.service.capacity.give_back(self._places, self.owner)
        self._places = 0

    def close(self, error: BaseException | None = None) -> None:
        """Ends everything; later calls do nothing. error: why the request was not answered as it should be."""
        if not self.closed:
            self.closed = True
            self._watch(None)
            self.release()
            self.on_release = _nothing  # without cycles, a request is freed at once and not by the garbage collector
            self.record.end(error)

    def _refuse(self, error: RouterError) -> bool:
        """Ends the request with an error. Returns False if its body still comes, or it has ended already."""
        if self.closed or self.refusal is not None or self._task is None or not self.size:
            return False
        self.refusal = error
        return self._task.cancel()


def _nothing() -> None:
    """Does nothing."""


class PostRoutes(list[Route]):
    """The routes of one interface. errors: as the API's description has them."""

    def __init__(self, service: Service, errors: Responses) -> None:
        super().__init__()
        self._service = service
        self._errors = errors

    def receive(
        self,
        path: str,
        summary: str,
        model: type[M],
        handle: Callable[[Admission, M], Awaitable[Response]],
        answer: type[ResponseModel] | str | None,
        events: type[ResponseModel] | str | None = None,
        errors: Responses | None = None,
        *,
        lines: type[ResponseModel] | str | None = None,
    ) -> None:
        """Adds a route whose requests are a `model`. answer, events, lines: the description of a response in one piece,
        of a stream of events, and of one of lines of JSON; None: there is none. errors: None: those of the interface.
        """

        async def respond(request: Request) -> Response:
            return await respond_to(self._service, request, model, handle)

        responses = (errors or self._errors) | answered_by(answer, events, lines)
        self.append(DescribedRoute(path, respond, summary, responses, method="POST", body=model))


async def respond_to(
    service: Service, request: Request, model: type[M], handle: Callable[[Admission, M], Awaitable[Response]]
) -> Response:
    """Returns what `handle` makes of a request, whose body is a `model`. A stream closes the admission at its end.

    Raises RouterError.
    """
    admission = Admission(service, request)
    try:
        response = await handle(admission, await admission.read(model))
    except asyncio.CancelledError as error:
        admission.close(admission.refusal or error)
        if admission.refusal is None or (task := asyncio.current_task()) is None:
            raise
        task.uncancel()
        raise admission.refusal from None
    except RouterError as error:
        admission.close(error)
        raise
    except Exception as fault:
        failure = RouterError("the server failed to handle the request")
        failure.__cause__ = fault
        admission.close(failure)
        raise failure from None
    if not isinstance(response, EventStream):
        admission.close()
    return response


async def read_body(request: Request, limit: int) -> bytes:
    """Returns the body.

    Raises UnsupportedMediaType for one that is compressed, PayloadTooLarge as soon as it cannot be within `limit`
    bytes, ClientGone when it stops coming, and Overloaded when there is no memory for what it will become.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"requests must not be compressed; the content encoding is {encoding[:40]!r}")
    announced = int(request.headers.get("content-length", "0"))
    if announced > limit:
        await _discard(request, announced)
        raise _too_large(limit)
    lease = lease_of(request.scope)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client disconnected before its request was complete")
        size += len(message["body"])
        if size > limit:
            await _discard(request, size)
            raise _too_large(limit)
        chunks.append(message["body"])
        lease.grow(len(message["body"]))
        if not message["more_body"]:
            body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            lease.parse(body)
            return body


def read_json(body: bytes) -> Any:
    """Returns the body as Python objects. Raises InvalidRequest if it is not JSON, or nests too deep."""
    try:
        return from_json(body)
    except ValueError as error:
        raise InvalidRequest(f"the request is not JSON: {error}") from None


async def _discard(request: Request, size: int) -> None:
    """Reads the rest of a body. size: its bytes, as announced, or as read so far."""
    if request.headers.get("expect", "").lower() == "100-continue":
        return
    while size <= _PATIENCE:
        message = await request.receive()
        if message["type"] == "http.disconnect" or not message["more_body"]:
            return
        size += len(message["body"])


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request has more than {limit} bytes (--payload-limit)")
