"""Requests of this process to its own model, processed by the same route handlers as those of a server."""

import asyncio
import warnings
from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from tgi_server.router.api.admission import Admission, respond_to
from tgi_server.router.api.connections import REFUSE, WATCH
from tgi_server.router.api.memory import LEASE, Account, Lease
from tgi_server.router.api.routes.chat import answer_chat
from tgi_server.router.api.routes.completions import complete
from tgi_server.router.api.routes.embeddings import embed_texts
from tgi_server.router.errors import NotSupported
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.encoding import EmbeddingsRequest
from tgi_server.router.service import UNLIMITED, Service

_HANDLERS: dict[str, tuple[type[BaseModel], Callable[[Admission, Any], Awaitable[Response]]]] = {
    "/v1/chat/completions": (ChatRequest, answer_chat),
    "/v1/completions": (CompletionRequest, complete),
    "/v1/embeddings": (EmbeddingsRequest, embed_texts),
}


async def ask(service: Service, path: str, body: bytes) -> bytes:
    """Returns the response to a request, both as JSON. Raises RouterError."""
    return bytes((await _respond(service, _request(path, body))).body)


async def stream(service: Service, path: str, body: bytes, take: Callable[[bytes], None]) -> None:
    """Passes the server-sent events of the response to `take`, as they come. Raises RouterError."""

    async def send(message: Message) -> None:
        if data := message.get("body"):
            take(data)

    request = _request(path, body)
    await (await _respond(service, request))(request.scope, request.receive, send)


async def _respond(service: Service, request: Request) -> Response:
    if not service.generates and request.scope["path"] != "/v1/embeddings":
        raise NotSupported("the model is an embedding model; it does not generate text")
    response = await respond_to(service, request, *_HANDLERS[request.scope["path"]])
    if left := response.headers.get("x-unenforced-constraints"):
        warnings.warn(f"constraints are left to the model: {left}", stacklevel=2)
    return response


def _request(path: str, body: bytes) -> Request:
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.Event().wait()  # the sender leaves by cancelling its task
        return messages.pop()

    lease = Lease(Account(UNLIMITED, 1.0), "", _never)
    state = {LEASE: lease, REFUSE: _never, WATCH: _never}
    return Request({"type": "http", "method": "POST", "path": path, "headers": [], "state": state}, receive)


def _never(*_: object) -> None:
    """Does nothing, in place of a callback for the end of a connection: there is no connection."""
