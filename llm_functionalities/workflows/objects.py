"""JSON objects in a model's answer, whatever stands around them."""

import json
from typing import Any

LONGEST_ANSWER = 20_000
MOST_ATTEMPTS = 50

_decoder = json.JSONDecoder()


def first_object(text: str) -> dict[str, Any] | None:
    """The first whole JSON object in `text`; None when there is none."""
    text = text[:LONGEST_ANSWER]
    start = text.find("{")
    for _ in range(MOST_ATTEMPTS):
        if start < 0:
            return None
        try:
            value, _ = _decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
        else:
            return value if isinstance(value, dict) else None
    return None


def words(value: Any, longest: int) -> str:
    """A text or a number of a JSON object as one line; empty when it is neither, or longer than `longest`."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    try:
        line = " ".join(str(value).split())
    except ValueError:
        return ""  # a number of more digits than Python writes
    return line if len(line) <= longest and line.isprintable() else ""
