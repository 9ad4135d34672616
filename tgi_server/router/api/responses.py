"""Responses as bytes: JSON of tokens and texts, and errors as the client's protocol has them."""

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from math import isfinite

from starlette.datastructures import Headers
from starlette.responses import Response

from shared.stubs.generate_pb2 import TopTokens
from tgi_server.router.errors import NoSuchRoute, Overloaded, RouterError, Unauthorized, error_body, shown_status
from tgi_server.router.metrics import RequestTimes
from tgi_server.router.text.tokenizer import TextTokenizer

JSON = "application/json"
EVENTS = "text/event-stream"
_RETRY_SECONDS = "1"
# Of what a header tells: proxies take some kilobytes of all headers.
_LINES, _LONGEST_LINE = 10, 200
_STREAMS = frozenset({"/generate_stream"})


def json_response(text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(text.encode(), media_type=JSON, headers=headers)


def error_text(error: RouterError, path: str) -> str:
    """Returns the error as JSON: TGI's object, or OpenAI's below /v1/."""
    return json.dumps(error_body(error, path), ensure_ascii=False, separators=(",", ":"))


def error_response(error: RouterError, path: str, headers: Headers) -> Response:
    """Returns the response to a request that failed before anything of its response was sent.

    A client of /generate_stream that says that it reads events gets an event; all others get JSON.
    """
    extra: dict[str, str] = {}
    if isinstance(error, Overloaded):
        extra["retry-after"] = _RETRY_SECONDS
    if isinstance(error, Unauthorized):
        extra["www-authenticate"] = "Bearer"
    if isinstance(error, NoSuchRoute) and error.allowed:
        extra["allow"] = ", ".join(error.allowed)
    status = shown_status(error, path)
    text = error_text(error, path)
    if path in _STREAMS and EVENTS in headers.get("accept", ""):
        return Response(event(text), status_code=status, media_type=EVENTS, headers=extra)
    return Response(text.encode(), status_code=status, media_type=JSON, headers=extra)


# A string as JSON, characters beyond ASCII left as they are.
quoted: Callable[[str], str] = encode_basestring
# Characters that end a line for `str.splitlines`, by which many clients (huggingface_hub's) read events. In JSON they
# can only stand within strings, where control characters have been escaped already.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


def number(value: float | None) -> str:
    """Returns a logprob as JSON, with the digits that a 32-bit float has; null when there is none."""
    return f"{value:.8g}" if value is not None and isfinite(value) else "null"


def optional(value: int | None) -> str:
    return "null" if value is None else str(value)


def token_json(token_id: int, text: str, logprob: float | None, *, special: bool, drafted: bool = False) -> str:
    """Returns a token as a JSON object. That it had been drafted is a member that TGI does not have."""
    flag = "true" if special else "false"
    more = ',"drafted":true' if drafted else ""
    return f'{{"id":{token_id},"text":{quoted(text)},"logprob":{number(logprob)},"special":{flag}{more}}}'


def top_tokens_json(tokenizer: TextTokenizer, top: TopTokens) -> str:
    """Returns the most likely tokens at one position, as a JSON array."""
    return f"[{','.join(_top(tokenizer, top.ids, top.logprobs))}]"


def _top(tokenizer: TextTokenizer, ids: Sequence[int], logprobs: Sequence[float]) -> list[str]:
    return [
        token_json(each, tokenizer.token_text(each), logprob, special=each in tokenizer.special_tokens)
        for each, logprob in zip(ids, logprobs, strict=True)
    ]


def event(json_text: str) -> bytes:
    """Returns one server-sent event."""
    return f"data:{_on_one_line(json_text)}\n\n".encode()


def named_event(name: str, json_text: str) -> bytes:
    """Returns one server-sent event with a name."""
    return f"event: {name}\ndata: {_on_one_line(json_text)}\n\n".encode()


def _on_one_line(json_text: str) -> str:
    """Returns the same JSON, which is one line however its reader tells lines apart."""
    return json_text if json_text.isascii() else json_text.translate(_LINE_ENDS)


def compute_headers(compute_type: str, *, characters: int) -> dict[str, str]:
    """Returns those of TGI's headers that are known before the first token. characters: of the prompts."""
    return {"x-compute-type": compute_type, "x-compute-characters": str(characters)}


def timing_headers(
    compute_type: str, times: RequestTimes, *, characters: int, prompt_tokens: int, generated_tokens: int
) -> dict[str, str]:
    """Returns TGI's headers. Times are in milliseconds, but for `x-compute-time` (seconds)."""
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
    """Returns the lines as one, in ASCII as headers are, and the number of those that have no room."""
    shown = [ascii(line[:_LONGEST_LINE])[1:-1] for line in lines[:_LINES]]
    return "; ".join([*shown, *([f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else [])])


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
