"""JSON schemas to measure grammars with."""

from random import Random
from typing import Any

from benchmarks.words import text

JsonSchema = dict[str, Any]


def _object(properties: dict[str, JsonSchema]) -> JsonSchema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


# An object of which the model chooses little but short values.
KNOWN_KEYS = _object(
    {
        "is the customer satisfied with the answer": {"type": "boolean"},
        "how many items are in the order": {"type": "integer", "minimum": 0, "maximum": 9},
        "the kitchen that the recipe belongs to": {"enum": ["italian", "french", "indian"]},
        "can the work be done without electric tools": {"type": "boolean"},
        "the number of people that it is enough for": {"type": "integer", "minimum": 1, "maximum": 9},
        "does the assistant have to ask once more": {"type": "boolean"},
        "the month in which it tastes best": {"enum": ["may", "june", "july"]},
        "does any of the ingredients contain nuts": {"type": "boolean"},
    }
)

# Texts that do not come to an end, in which the model chooses nearly every token.
LONG_TEXTS: JsonSchema = {"type": "array", "items": {"type": "string"}, "minItems": 1000}


def large_schema(random: Random, members: int = 60) -> JsonSchema:
    """Makes an object with this many members, all of them required: texts, choices, numbers, dates, lists and objects.

    Every one has names and choices of its own, so that nothing of it can have been compiled before.
    """
    makers = (_words, _choice, _number, _date, _words, _list, _record)
    return _object({_name(random, i): makers[i % len(makers)](random) for i in range(members)})


def _name(random: Random, number: int) -> str:
    return f"{text(random, 2).replace(' ', '_')}_{number}"


def _words(random: Random) -> JsonSchema:
    low = random.randint(20, 60)
    return {"type": "string", "description": text(random, 8), "minLength": low, "maxLength": 2 * low}


def _choice(random: Random) -> JsonSchema:
    return {"enum": sorted({text(random, 2) for _ in range(20)})}


def _number(random: Random) -> JsonSchema:
    low = random.randint(-1000, 1000)
    return {"type": "number", "minimum": low, "maximum": low + random.randint(1, 5000)}


def _date(random: Random) -> JsonSchema:
    return {"type": "string", "format": random.choice(["date", "date-time", "uuid", "email"])}


def _list(random: Random) -> JsonSchema:
    return {"type": "array", "items": _words(random), "minItems": 1, "maxItems": random.randint(2, 6)}


def _record(random: Random) -> JsonSchema:
    return _object({_name(random, i): maker(random) for i, maker in enumerate((_words, _choice, _number))})
