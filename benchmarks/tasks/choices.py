"""Choices and questions of yes or no: by `/v1/decisions`, by text that a grammar binds, and by free text."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tasks.case import (
    CHAT,
    DECISIONS,
    TaskAnswer,
    TaskCase,
    TaskVerdict,
    chat,
    json_format,
    plain,
    read_data,
    user,
)

_MAX_TOKENS = 100
_YES_NO = ("yes", "no")
NORMALIZATIONS = ("none", "orders", "calibration")
SCORINGS = ("labels", "sequences")


def cases() -> list[TaskCase]:
    made: list[TaskCase] = []
    for number, data in enumerate(read_data("choices")["cases"]):
        options = _rotated(data["options"], number) if data["kind"] == "choice" else list(_YES_NO)
        right = data["answer"] if data["kind"] == "choice" else _YES_NO[not data["answer"]]
        made += [_by_grammar(number, data, options, right), _freely(number, data, options, right)]
        made += [
            _decided(number, data, options, right, scoring, normalization)
            for scoring in (SCORINGS if data["kind"] == "choice" else SCORINGS[:1])
            for normalization in NORMALIZATIONS
        ]
    return made


def _rotated(options: Sequence[str], number: int) -> list[str]:
    """Returns the options in an order that differs from case to case, so that every position is right at times."""
    start = number % len(options)
    return [*options[start:], *options[:start]]


def _prompt(data: Mapping[str, Any], options: Sequence[str]) -> list[dict[str, Any]]:
    return [user(f"{data['input']}\n\n{data['question']}\nAnswer with one of these only: {', '.join(options)}.")]


def _by_grammar(number: int, data: Mapping[str, Any], options: Sequence[str], right: str) -> TaskCase:
    schema = {"type": "string", "enum": options}

    def score(answer: TaskAnswer) -> TaskVerdict:
        try:
            chosen = json.loads(answer.text)
        except ValueError:
            return TaskVerdict(0.0, valid=False)
        return TaskVerdict(float(chosen == right), chosen in options)

    body = chat(_prompt(data, options), _MAX_TOKENS, response_format=json_format("answer", schema))
    return TaskCase(f"{data['kind']}: by grammar", f"choices-{number}", CHAT, body, score)


def _freely(number: int, data: Mapping[str, Any], options: Sequence[str], right: str) -> TaskCase:
    def score(answer: TaskAnswer) -> TaskVerdict:
        return TaskVerdict(float(named_option(answer.text, options) == right))

    return TaskCase(
        f"{data['kind']}: free", f"choices-{number}", CHAT, chat(_prompt(data, options), _MAX_TOKENS), score
    )


def named_option(text: str, options: Sequence[str]) -> str | None:
    """Returns the only option that a text names; None if it names none, or several.

    A longer option hides a shorter one that is a part of it.
    """
    found: set[str] = set()
    rest = plain(text)
    for option in sorted(options, key=len, reverse=True):
        rest, count = re.subn(rf"(?<!\w){re.escape(plain(option))}(?!\w)", "|", rest)
        if count:
            found.add(option)
    return found.pop() if len(found) == 1 else None


def _decided(
    number: int, data: Mapping[str, Any], options: Sequence[str], right: str, scoring: str, normalization: str
) -> TaskCase:
    question: dict[str, Any] = {"type": "predicate", "instructions": data["question"]}
    if data["kind"] == "choice":
        question |= {"type": "choice", "choices": [{"value": each} for each in options]}

    def score(answer: TaskAnswer) -> TaskVerdict:
        probability = _probabilities(answer.body["answers"][0])
        best = max(options, key=lambda each: probability[each])
        return TaskVerdict(float(best == right), loss=-math.log(max(probability[right], 1e-9)))

    body = {"input": data["input"], "questions": [question], "scoring": scoring, "normalization": normalization}
    family = f"{data['kind']}: decisions, {scoring}, {normalization}"
    return TaskCase(family, f"choices-{number}", DECISIONS, body, score)


def _probabilities(answer: Mapping[str, Any]) -> dict[str, float]:
    if answer["type"] == "predicate":
        return {"yes": answer["probability"], "no": 1 - answer["probability"]}
    return {each["value"]: each["probability"] for each in answer["probabilities"]}
