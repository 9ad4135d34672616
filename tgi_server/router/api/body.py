"""Request bodies: read no further than the limit, then taken as JSON."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from shared.logging import one_line
from tgi_server.router.api.memory import lease_of
from tgi_server.router.errors import ClientGone, InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from tgi_server.router.text.tokenizer import TokenizerThreads

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

# A client that is still sending does not read an answer, so what is too much is read and thrown away, up to this.
_PATIENCE = 64 * 2**20

# A body of this many bytes takes less than a millisecond to read, whatever is in it.
SMALL = 8_192

_MOST_FAULTS = 10
_LONGEST_NAME = 80
_LONGEST_NUMBER = 40
_LONGEST_FAULT = 200
_JSON_TYPES = dict.fromkeys(("model_type", "dict_type"), "Input should be an object")
_BOUNDS = {"le": "at most", "lt": "less than", "ge": "at least", "gt": "greater than"}


async def read_body(request: Request, limit: int) -> bytes:
    """Returns the body.

    Raises UnsupportedMediaType for one that is compressed, PayloadTooLarge as soon as it cannot be within `limit`
    bytes, ClientGone when it stops coming, and Overloaded when there is no memory for what it will become.
    """
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(f"a request is sent as it is, not with the content encoding {encoding[:40]!r}")
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
            raise ClientGone("the client left before its request was complete")
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
    """Returns the body as Python objects. Raises InvalidRequest for what is no JSON, or nests too deep."""
    try:
        return from_json(body)
    except ValueError as error:
        raise InvalidRequest(f"the request is not JSON: {error}") from None


def validate(model: type[M], content: Any) -> M:
    """Returns the content of a body as `model`. Raises InvalidRequest with one line for what is wrong."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise InvalidRequest(explain(error)) from None


def parse(model: type[M], body: bytes) -> M:
    """Returns the body as `model`. Raises InvalidRequest."""
    return validate(model, read_json(body))


def form_of(content: Any, forms: Mapping[str, type[M]]) -> type[M]:
    """Returns the model of a body that has one of several forms: that of the first field in `forms` that it has.

    Raises InvalidRequest for a body without any of the fields.
    """
    for field, model in forms.items():
        if isinstance(content, dict) and content.get(field) is not None:
            return model
    *names, last = (f"`{field}`" for field in forms)
    raise InvalidRequest(f"the request needs {', '.join(names)} or {last}")


def parse_form(forms: Mapping[str, type[M]], body: bytes) -> M:
    """Returns the body as the model of its form. Raises InvalidRequest."""
    content = read_json(body)
    return validate(form_of(content, forms), content)


async def read_beside_loop(threads: TokenizerThreads, body: bytes, read: Callable[[bytes], T]) -> T:
    """Returns what `read` makes of the body; a large one is read in a thread."""
    return await threads.handle_text(len(body), lambda: read(body), at_once=SMALL)


def explain(error: ValidationError) -> str:
    """Returns what is wrong with a request's JSON, in one line. Of what the client sent it repeats numbers only."""
    faults: dict[str, None] = {}
    for detail in error.errors(include_url=False):
        if len(faults) == _MOST_FAULTS:
            faults["and more"] = None
            break
        name = one_line(".".join(str(part) for part in detail["loc"]), _LONGEST_NAME)
        faults[f"`{name}`{_fault(detail)}" if name else f"the request{_fault(detail)}"] = None
    return "; ".join(faults)


def _bound(detail: ErrorDetails) -> str | None:
    """Returns the bound that a number breaks, in words; None for any other fault."""
    context = detail.get("ctx", {})
    return context.get("bound") or next(
        (f"{words} {context[bound]}" for bound, words in _BOUNDS.items() if bound in context), None
    )


def _fault(detail: ErrorDetails) -> str:
    bound = _bound(detail)
    if bound is None:
        message = _JSON_TYPES.get(detail["type"], detail["msg"]).removeprefix("Value error, ")
        return f"{' ' if message.startswith('must ') else ': '}{one_line(message, _LONGEST_FAULT)}"
    return f" is {one_line(str(detail['input']), _LONGEST_NUMBER)}; it must be {bound}"


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
