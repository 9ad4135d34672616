"""The response of a server, whole or streamed, in OpenAI's form or TGI's."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.connection import TimedResponse


class BadReply(Exception):
    """The server refused, failed, or sent what cannot be understood."""


@dataclass(slots=True)
class Reply:
    """prompt_tokens, and those of them that were cached: None when the server does not tell.

    token_times: when a stream's tokens came, in seconds. texts: of these tokens. calls: of tools, name and arguments of
    each.
    """

    text: str
    new_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    token_times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)


def read_reply(response: TimedResponse) -> Reply:
    """Raises BadReply."""
    if response.status != 200:
        raise BadReply(f"status {response.status}: {response.body[:300].decode(errors='replace')}")
    try:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return _streamed(response)
        answer = json.loads(response.body)
        return _whole(answer) if "choices" in answer else _whole_tgi(answer, response)
    except (ValueError, LookupError, TypeError) as error:
        raise BadReply(f"an answer that cannot be understood: {type(error).__name__} {error}") from error


def _whole(answer: dict[str, Any]) -> Reply:
    choice, usage = answer["choices"][0], answer["usage"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return Reply(text or "", usage["completion_tokens"], usage.get("prompt_tokens"))


def _whole_tgi(answer: dict[str, Any], response: TimedResponse) -> Reply:
    prompt_tokens = response.headers.get("x-prompt-tokens")
    new_tokens = answer["details"]["generated_tokens"]
    return Reply(answer["generated_text"], new_tokens, int(prompt_tokens) if prompt_tokens else None)


def _streamed(response: TimedResponse) -> Reply:
    reply = Reply("", 0)
    texts: list[str] = []
    calls: dict[int, dict[str, str]] = {}
    for moment, event in _events(response):
        if "error" in event:
            raise BadReply(f"the stream ended with an error: {json.dumps(event['error'])[:300]}")
        _count_usage(reply, event)
        text = _token_text(event)
        if _add_calls(calls, event):
            text = text or ""
        if text is not None:
            texts.append(text)
            reply.token_times.append(moment)
    if not texts:
        raise BadReply("a stream without a token")
    reply.text, reply.texts = "".join(texts), texts
    reply.calls = list(calls.values())
    reply.new_tokens = reply.new_tokens or len(texts)
    return reply


def _events(response: TimedResponse) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields the server-sent events that are JSON objects, each with the moment in which it was complete."""
    rest = b""
    for moment, piece in response.pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield moment, json.loads(data)


def _count_usage(reply: Reply, event: dict[str, Any]) -> None:
    if usage := event.get("usage"):
        reply.new_tokens, reply.prompt_tokens = usage["completion_tokens"], usage.get("prompt_tokens")
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    elif details := event.get("details"):
        reply.new_tokens, reply.prompt_tokens = details["generated_tokens"], details.get("input_length")


def _add_calls(calls: dict[int, dict[str, str]], event: dict[str, Any]) -> bool:
    """Adds an event's pieces of calls to those so far, by their index. Returns True if it has any."""
    deltas = [each for choice in event.get("choices") or () for each in choice.get("delta", {}).get("tool_calls") or ()]
    for delta in deltas:
        call, new = calls.setdefault(delta["index"], {"name": "", "arguments": ""}), delta.get("function") or {}
        for key in call:
            call[key] += new.get(key) or ""
    return bool(deltas)


def _token_text(event: dict[str, Any]) -> str | None:
    """Returns the text of an event that stands for a token; None for one of the role, the usage, or the end."""
    if "token" in event:
        return event["token"]["text"]
    if not event["choices"]:
        return None
    choice = event["choices"][0]
    if "delta" not in choice:
        return choice["text"] or ""
    delta = choice["delta"]
    content = delta.get("content")
    return None if content == "" and "role" in delta else content
