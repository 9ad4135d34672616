"""Encodes responses: objects as JSON or events, and errors in the form of the client's API."""

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response

from shared.stubs.generate_pb2 import TopTokens
from tgi_server.router.errors import (
    ANTHROPIC,
    OLLAMA,
    CannotBeInTime,
    ModelNotReady,
    NoSuchModel,
    NoSuchRoute,
    NotSupported,
    Overloaded,
    RequestTimedOut,
    RouterError,
    Unauthorized,
    error_body,
    shown_status,
)
from tgi_server.router.metrics import RequestTimes
from tgi_server.router.schemas.generate import Token
from tgi_server.router.text.tokenizer import TextTokenizer

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
_RETRY_SECONDS = "1"
# Maximum number of lines in a header's value, and of characters of each: proxies accept a few kilobytes of headers.
_LINES, _LONGEST_LINE = 10, 200
_STREAMS = frozenset({"/generate_stream"})


def json_response(content: Any, headers: dict[str, str] | None = None) -> Response:
    """Returns a JSON response. content: an object, or bytes that are JSON already."""
    return Response(content if isinstance(content, bytes) else to_json(content), media_type=JSON, headers=headers)


def error_response(error: RouterError, path: str, headers: Headers) -> Response:
    """Returns the response to a request that failed before its response had begun.

    Clients of /generate_stream that accept events get an event; all others get JSON.
    """
    extra: dict[str, str] = {}
    if error.code is not None:
        extra["x-error-code"] = error.code
    if isinstance(error, Overloaded):
        extra["retry-after"] = _RETRY_SECONDS
    if isinstance(error, CannotBeInTime | ModelNotReady):
        extra["retry-after"] = str(error.retry_after)
    # OpenAI's and Anthropic's clients would retry these, though it is useless.
    if isinstance(error, RequestTimedOut | NotSupported | NoSuchModel):
        extra["x-should-retry"] = "false"
    if isinstance(error, Unauthorized):
        extra["www-authenticate"] = "Bearer"
    if isinstance(error, NoSuchRoute) and error.allowed:
        extra["allow"] = ", ".join(error.allowed)
    status = shown_status(error, path)
    body = error_body(error, ANTHROPIC if speaks_anthropic(headers) else path)
    if path in _STREAMS and EVENTS in headers.get("accept", ""):
        return Response(tgi_event(body), status_code=status, media_type=EVENTS, headers=extra)
    return Response(to_json(body), status_code=status, media_type=JSON, headers=extra)


def speaks_anthropic(headers: Headers) -> bool:
    """Returns True if the client uses Anthropic's API, which requires the header `anthropic-version`."""
    return "anthropic-version" in headers


to_json: Callable[[Any], bytes] = msgspec.json.Encoder().encode
# Characters that end a line for `str.splitlines`, with which many clients (huggingface_hub's) read events. In JSON they
# can only be inside strings, where control characters have been escaped already.
_LINE_ENDS = {character.encode(): f"\\u{ord(character):04x}".encode() for character in "\x85\u2028\u2029"}


def known_logprob(value: float | None) -> float | None:
    """Returns a logprob rounded to the digits of a 32-bit float; None if it is None or not finite."""
    return float(f"{value:.8g}") if value is not None and isfinite(value) else None


def top_tokens(tokenizer: TextTokenizer, top: TopTokens) -> list[Token]:
    """Returns the most likely tokens at one position."""
    special = tokenizer.special_tokens
    return [
        Token(id=each, text=tokenizer.token_text(each), logprob=known_logprob(logprob), special=each in special)
        for each, logprob in zip(top.ids, top.logprobs, strict=True)
    ]


def event(content: Any) -> bytes:
    """Returns an object as one server-sent event, with the space that many clients of OpenAI's API rely on."""
    return b"data: %b\n\n" % _on_one_line(to_json(content))


def tgi_event(content: Any) -> bytes:
    """Returns an object as one server-sent event in TGI's format, without a space."""
    return b"data:%b\n\n" % _on_one_line(to_json(content))


def named_event(name: str, content: Any) -> bytes:
    """Returns an object as one server-sent event with a name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _on_one_line(to_json(content)))


def line(content: Any) -> bytes:
    """Returns an object as one line of newline-delimited JSON."""
    return _on_one_line(to_json(content)) + b"\n"


def error_event(error: RouterError, path: str) -> bytes:
    """Returns an error as one server-sent event in the form of the API at `path`; for Ollama's API as one line."""
    body = error_body(error, path)
    if path.startswith(OLLAMA):
        return line(body)
    if "type" in body:
        return named_event(body["type"], body)
    return tgi_event(body) if isinstance(body["error"], str) else event(body)


def _on_one_line(text: bytes) -> bytes:
    """Escapes all characters that a reader of JSON may take for the end of a line."""
    if not text.isascii():
        for character, escaped in _LINE_ENDS.items():
            text = text.replace(character, escaped)
    return text


def compute_headers(compute_type: str, *, characters: int) -> dict[str, str]:
    """Returns TGI's headers that are known before the first token. characters: number of characters in all prompts."""
    return {"x-compute-type": compute_type, "x-compute-characters": str(characters)}


def timing_headers(
    compute_type: str, times: RequestTimes, *, characters: int, prompt_tokens: int, generated_tokens: int
) -> dict[str, str]:
    """Returns TGI's headers. Times are in milliseconds, except `x-compute-time` (seconds)."""
    return {
        **compute_headers(compute_type, characters=characters),
        "x-compute-time": f"{times.total:.6f}",
        "x-total-time": _milliseconds(times.total),
        "x-validation-time": _milliseconds(times.validation),
        "x-queue-time": _milliseconds(times.queue),
        "x-inference-time": _milliseconds(times.inference),
        "x-time-per-token": _milliseconds(times.per_token),
        "x-prompt-tokens": str(prompt_tokens),
        "x-generated-tokens": str(generated_tokens),
    }


def shortened(lines: Sequence[str]) -> str:
    """Joins lines to one ASCII text for a header. Long lines are cut, and further lines are only counted."""
    shown = [ascii(line[:_LONGEST_LINE])[1:-1] for line in lines[:_LINES]]
    return "; ".join([*shown, *([f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else [])])


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
