"""Request bodies: read no further than the limit, then taken as JSON."""

from typing import Any

from pydantic_core import from_json
from starlette.requests import Request

from tgi_server.router.api.memory import lease_of
from tgi_server.router.errors import ClientGone, InvalidRequest, PayloadTooLarge, UnsupportedMediaType

# A client that is still sending does not read an answer, so what is too much is read and thrown away, up to this.
_PATIENCE = 64 * 2**20

# A body of this many bytes takes less than a millisecond to read, whatever is in it.
SMALL = 8_192


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
