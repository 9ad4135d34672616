"""Extraction of records from texts into JSON schemas, and of spans, which are verbatim pieces of a text."""

import json
from collections.abc import Mapping
from typing import Any

import jsonschema

from benchmarks.tasks.case import (
    CHAT,
    TaskAnswer,
    TaskCase,
    TaskVerdict,
    chat,
    json_format,
    matches,
    plain,
    read_data,
    system,
    user,
)

_MAX_TOKENS = 300
_MISSING: dict[str, Any] = {}


def cases() -> list[TaskCase]:
    data = read_data("extraction")
    return [_record(number, each, data["schemas"][each["schema"]]) for number, each in enumerate(data["cases"])]


def span_cases() -> list[TaskCase]:
    return [_span(number, each) for number, each in enumerate(read_data("spans")["cases"])]


def _record(number: int, data: Mapping[str, Any], schema: Mapping[str, Any]) -> TaskCase:
    name = data["schema"]
    messages = [system(f"Extract the {name} from the user's text as JSON."), user(data["text"])]

    def score(answer: TaskAnswer) -> TaskVerdict:
        got, valid = parsed(answer.text, schema)
        right, all_ = _members(data["expected"], got)
        return TaskVerdict(right / all_, valid)

    body = chat(messages, _MAX_TOKENS, response_format=json_format(name, schema))
    return TaskCase("extraction", f"extraction-{number}", CHAT, body, score)


def _span(number: int, data: Mapping[str, Any]) -> TaskCase:
    text = data["text"]
    schema = {
        "type": "object",
        "properties": {"answer": {"type": "string", "x-span": True, "x-span-source": text}},
        "required": ["answer"],
        "additionalProperties": False,
    }
    asked = f"{text}\n\n{data['question']} TaskAnswer with words of the text, as JSON."

    def score(answer: TaskAnswer) -> TaskVerdict:
        got, valid = parsed(answer.text, schema)
        span = got.get("answer", "") if isinstance(got, dict) else ""
        right = plain(str(span)) in map(plain, data["answers"])
        return TaskVerdict(float(right), valid and span in text)

    body = chat([user(asked)], _MAX_TOKENS, response_format=json_format("answer", schema))
    return TaskCase("spans", f"spans-{number}", CHAT, body, score)


def parsed(text: str, schema: Mapping[str, Any]) -> tuple[Any, bool]:
    """Returns the JSON of an answer, and whether it matches the schema; an empty object for what is not JSON."""
    try:
        got = json.loads(text)
        jsonschema.validate(got, schema, format_checker=jsonschema.FormatChecker())
    except jsonschema.ValidationError:
        return got, False
    except ValueError:
        return _MISSING, False
    return got, True


def _members(expected: Mapping[str, Any], got: Any) -> tuple[int, int]:
    """Returns how many of the expected members are right, and their number; those of inner objects count one by one."""
    right = all_ = 0
    for name, value in expected.items():
        inner = got.get(name) if isinstance(got, dict) else None
        if isinstance(value, dict) and set(value) != {"any"}:
            some, more = _members(value, inner)
        else:
            some, more = int(isinstance(got, dict) and name in got and matches(value, inner)), 1
        right, all_ = right + some, all_ + more
    return right, all_
