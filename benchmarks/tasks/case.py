"""One request with a program that scores its answer, and the comparisons that scores are made of."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHAT, DECISIONS = "/v1/chat/completions", "/v1/decisions"
_DATA = Path(__file__).with_name("data")
# As `{"any": ANYTHING}` in the data: every value is right.
ANYTHING = "anything"


@dataclass(frozen=True, slots=True)
class TaskCall:
    """A call of a tool. arguments: the text, as the server sent it."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TaskAnswer:
    """The answer of a server. body: the whole response; text, calls and finish_reason: those of a chat."""

    body: dict[str, Any]
    text: str = ""
    calls: Sequence[TaskCall] = ()
    finish_reason: str | None = None

    @classmethod
    def read(cls, body: dict[str, Any]) -> "TaskAnswer":
        """Reads the body of a response. Raises LookupError or TypeError if it is not one."""
        if "choices" not in body:
            return cls(body)
        choice = body["choices"][0]
        message = choice["message"]
        calls = [
            TaskCall(each["function"]["name"], each["function"]["arguments"])
            for each in message.get("tool_calls") or ()
        ]
        return cls(body, message.get("content") or "", calls, choice.get("finish_reason"))


@dataclass(frozen=True, slots=True)
class TaskVerdict:
    """The score of an answer, 0 to 1. valid: True if it matches the schemas of its request; None if there are none.

    loss: the negative log-probability of the right answer, where the server reports probabilities.
    """

    score: float
    valid: bool | None = None
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class TaskCase:
    """A request. family: the row of the table it counts in; a colon separates the group from the kind."""

    family: str
    name: str
    path: str
    body: Mapping[str, Any]
    score: Callable[[TaskAnswer], TaskVerdict] = field(repr=False)


def read_data(name: str) -> dict[str, Any]:
    """Returns the content of one of the data files."""
    content: dict[str, Any] = json.loads((_DATA / f"{name}.json").read_text(encoding="utf-8"))
    return content


def chat(messages: Sequence[Mapping[str, Any]], max_tokens: int, **options: Any) -> dict[str, Any]:
    """Returns the body of a greedy chat."""
    return {"messages": list(messages), "max_tokens": max_tokens, "temperature": 0, **options}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def json_format(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a `response_format` for a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema, "strict": True}}


def matches(expected: Any, got: Any) -> bool:
    """Returns True if a value is right: numbers by value, texts without regard to case and surrounding punctuation,
    lists in any order.

    `{"any": [...]}` lists several right values, of which null also stands for a missing member.
    """
    if isinstance(expected, dict) and set(expected) == {"any"}:
        alternatives = expected["any"]
        return alternatives == ANYTHING or any(matches(each, got) for each in alternatives)
    if isinstance(expected, dict):
        members = set(expected) | set(got) if isinstance(got, dict) else set()
        return isinstance(got, dict) and all(matches(expected.get(each), got.get(each)) for each in members)
    if isinstance(expected, list):
        return isinstance(got, list) and _same_elements(expected, got)
    if isinstance(expected, bool) or isinstance(got, bool) or expected is None or got is None:
        return expected is got
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return math.isclose(expected, got)
    return isinstance(expected, str) and isinstance(got, str) and plain(expected) == plain(got)


def plain(text: str) -> str:
    """Returns a text in lower case, without punctuation around it, and with single spaces."""
    return " ".join(text.casefold().split()).strip(" .,!?:;'\"`*")


def _same_elements(expected: list[Any], got: list[Any]) -> bool:
    rest = list(got)
    for each in expected:
        found = next((place for place, value in enumerate(rest) if matches(each, value)), None)
        if found is None:
            return False
        del rest[found]
    return not rest
