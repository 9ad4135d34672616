"""Answers as bytes, and errors as the client's protocol has them."""

import json

from starlette.datastructures import Headers
from starlette.responses import Response

from tgi_server.router.api.outbox import event
from tgi_server.router.errors import Overloaded, RouterError, Unauthorized
from tgi_server.router.token_json import quoted

JSON = "application/json"
EVENTS = "text/event-stream"
_OPENAI = "/v1/"
_RETRY_SECONDS = "1"
_STREAMS = frozenset({"/generate_stream"})


def json_answer(text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(text.encode(), media_type=JSON, headers=headers)


def error_text(error: RouterError, path: str) -> str:
    """The error as JSON: TGI's object, or OpenAI's below /v1/."""
    message = str(error)
    if error.error_type == "validation":
        message = f"Input validation error: {message}"
    if path.startswith(_OPENAI):
        return json.dumps(
            {
                "error": {"message": message, "type": error.error_type, "param": None, "code": None},
                "error_type": error.error_type,
            },
            ensure_ascii=False,
        )
    return f'{{"error":{quoted(message)},"error_type":{quoted(error.error_type)}}}'


def error_answer(error: RouterError, path: str, headers: Headers) -> Response:
    """The answer to a request that failed before anything of its answer was sent.

    A client of /generate_stream that says that it reads events gets an event; all others get JSON.
    """
    extra: dict[str, str] = {}
    if isinstance(error, Overloaded):
        extra["retry-after"] = _RETRY_SECONDS
    if isinstance(error, Unauthorized):
        extra["www-authenticate"] = "Bearer"
    text = error_text(error, path)
    if path in _STREAMS and EVENTS in headers.get("accept", ""):
        return Response(event(text), status_code=error.status, media_type=EVENTS, headers=extra)
    return Response(text.encode(), status_code=error.status, media_type=JSON, headers=extra)
