"""Models that would rather write a line break, or the end, than what a grammar wants next."""

import json
import re
from typing import Any

import jsonschema
import pytest

from tests.grammars import preferring
from tgi_server.contract import Grammar, GrammarKind

# What such a model wants, the first that the grammar allows: a line break and then the end, or the end at once.
WANTS = [["\n", None], [" ", "\n", None], [None, "\n"]]
BOOLEAN = {"type": "boolean"}
RECORD = {"type": "object", "properties": {"a": BOOLEAN, "b": BOOLEAN}, "required": ["a"]}
SPAN = {"type": "string", "x-span": True, "x-span-source": "Oat milk and two eggs"}
SCHEMAS = [
    {"type": "integer"},
    {"enum": ["yes", "yes, but"]},
    RECORD,
    {"type": "array", "items": BOOLEAN},
    {"type": "array", "items": RECORD, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"deep": {"type": "array", "items": RECORD}}, "required": ["deep"]},
    {"type": "object", "properties": {"span": SPAN}, "required": ["span"]},
    {"type": "object", "properties": {"spans": {"type": "array", "items": SPAN, "minItems": 1}}, "required": ["spans"]},
]
PATTERNS = ["yes|no", "(yes|yes, but)", "[0-9]+", "[0-9]+( km)?", "a(bc)*", "(one|two)\n?", "x\\s{0,3}", "[a-c]{2,4}"]


def schema_grammar(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


@pytest.mark.parametrize("wants", WANTS, ids=repr)
@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_json_ends_and_is_valid(schema: dict[str, Any], wants: list[str | None]):
    written = preferring(schema_grammar(schema), [*wants, "]", "}", '"'], most=100)
    assert written is not None
    jsonschema.validate(json.loads(written), schema)


@pytest.mark.parametrize("wants", WANTS, ids=repr)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_regular_expression_ends_and_matches_to_the_letter(pattern: str, wants: list[str | None]):
    written = preferring(Grammar(GrammarKind.REGEX, pattern), wants, most=100)
    assert written is not None
    assert re.fullmatch(pattern, written)


def test_a_tail_is_chosen_or_left_out():
    grammar = Grammar(GrammarKind.REGEX, "[0-9]+( km|\n)?")
    assert preferring(grammar, ["7", None], most=20) is None  # digits without a bound are the pattern's own
    assert preferring(grammar, [None, "7"]) == "7"
    assert preferring(grammar, [" ", None, "7"]) == "7 km"
    assert preferring(grammar, ["\n", None, "7"]) == "7\n"
