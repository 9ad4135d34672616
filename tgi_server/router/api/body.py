"""Request bodies: read no further than the limit, then taken as JSON."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from tgi_server.router.errors import ClientGone, InvalidRequest, PayloadTooLarge

M = TypeVar("M", bound=BaseModel)

# A client that is still sending does not read an answer, so what is too much is read and thrown away, up to this.
_PATIENCE = 64 * 2**20


async def read_body(request: Request, limit: int) -> bytes:
    """Raises PayloadTooLarge as soon as the body cannot be within `limit` bytes; ClientGone when it stops coming."""
    announced = int(request.headers.get("content-length", "0"))
    if announced > limit:
        await _discard(request, announced)
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("the client left before its request was complete")
        size += len(message["body"])
        if size > limit:
            await _discard(request, size)
            raise _too_large(limit)
        chunks.append(message["body"])
        if not message["more_body"]:
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def parse(model: type[M], body: bytes) -> M:
    """The body as `model`. Raises InvalidRequest with one line for all that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise InvalidRequest(explain(error)) from None


def explain(error: ValidationError) -> str:
    """What is wrong with a request's JSON, in one line that repeats nothing of it."""
    faults: list[str] = []
    for detail in error.errors(include_url=False, include_input=False, include_context=False):
        if detail["type"] == "json_invalid":
            return f"the request is not JSON: {detail['msg'].removeprefix('Invalid JSON: ')}"
        name = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        fault = f"`{name}`: {message}" if name else f"the request: {message}"
        if fault not in faults:
            faults.append(fault)
    return "; ".join(faults)


async def _discard(request: Request, size: int) -> None:
    """Reads what still comes of a body of which `size` bytes are announced or read."""
    if request.headers.get("expect", "").lower() == "100-continue":
        return
    while size <= _PATIENCE:
        message = await request.receive()
        if message["type"] == "http.disconnect" or not message["more_body"]:
            return
        size += len(message["body"])


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request has more than {limit} bytes (--payload-limit)")
