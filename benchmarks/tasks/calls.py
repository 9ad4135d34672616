"""Calls of tools: one, none, two, nested and enum arguments, required ones, and a result that has to be used."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema

from benchmarks.tasks.case import CHAT, TaskAnswer, TaskCase, TaskVerdict, chat, matches, read_data, user

_MAX_TOKENS = 300


def cases() -> list[TaskCase]:
    data = read_data("calls")
    tools = {name: tool_of(name, each["description"], each["parameters"]) for name, each in data["tools"].items()}
    return [
        _case(number, each, [tools[name] for name in data["sets"][each["tools"]]])
        for number, each in enumerate(data["cases"])
    ]


def tool_of(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _case(number: int, data: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> TaskCase:
    options = {"tools": tools, "tool_choice": data.get("tool_choice", "auto")}
    messages = [user(data["user"])]
    if data["kind"] == "result":
        messages += _done(data["calls"], data["results"])
    body = chat(messages, _MAX_TOKENS, **options)

    def score(answer: TaskAnswer) -> TaskVerdict:
        valid = valid_calls(answer, tools)
        if data["kind"] == "result":
            return TaskVerdict(float(not answer.calls and _tells(answer.text, data["contains"])), valid)
        return TaskVerdict(float(valid is not False and _same_calls(data["calls"], answer)), valid)

    return TaskCase(f"calls: {data['kind']}", f"calls-{number}", CHAT, body, score)


def _done(calls: Sequence[Mapping[str, Any]], results: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the messages of calls that were made, and of their results."""
    made = [
        {"id": f"call_{place}", "type": "function", "function": {**call, "arguments": json.dumps(call["arguments"])}}
        for place, call in enumerate(calls)
    ]
    told = [{"role": "tool", "tool_call_id": f"call_{place}", "content": text} for place, text in enumerate(results)]
    return [{"role": "assistant", "content": None, "tool_calls": made}, *told]


def _tells(text: str, contained: Sequence[Sequence[str]]) -> bool:
    """Returns True if a text has one of the alternatives of every entry."""
    return all(any(each.casefold() in text.casefold() for each in alternatives) for alternatives in contained)


def _same_calls(expected: Sequence[Mapping[str, Any]], answer: TaskAnswer) -> bool:
    """The answer is valid, so its arguments are JSON."""
    got = [{"name": each.name, "arguments": json.loads(each.arguments)} for each in answer.calls]
    return matches(list(expected), got)


def valid_calls(answer: TaskAnswer, tools: Sequence[Mapping[str, Any]]) -> bool | None:
    """Returns True if every call names a declared tool and has arguments that match its schema; None without calls."""
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    return all(_valid(each.name, each.arguments, schemas) for each in answer.calls) if answer.calls else None


def _valid(name: str, arguments: str, schemas: Mapping[str, Any]) -> bool:
    try:
        jsonschema.validate(json.loads(arguments), schemas[name])
    except (KeyError, ValueError, jsonschema.ValidationError):
        return False
    return True
