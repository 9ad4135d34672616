"""Which JSON schemas are known to be cheap."""

import json
from typing import Any

import pytest

from tests import hostile_grammars as hostile
from tgi_server.grammar.json_schema import is_simple

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}}}


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        PERSON | {"required": ["name"], "additionalProperties": False, "title": "Person"},
        {"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 20, "$defs": {"person": PERSON}},
        {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "size": {"anyOf": [PERSON, {"type": "null"}]}}},
        {"type": "string", "maxLength": 500, "description": "what a model sees of it costs nothing"},
    ],
)
def test_what_applications_send_is_simple(schema: Any) -> None:
    assert is_simple(json.dumps(schema))


@pytest.mark.parametrize(
    "schema",
    [
        hostile.references(1_000),
        hostile.spans(3_000),
        hostile.mutual(11),
        {"type": "string", "pattern": "a+"},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/a"}}}},
        {"type": "array", "maxItems": 60, "items": {"type": "array", "maxItems": 60, "items": {"type": "string"}}},
        {"type": "string", "maxLength": 100_000},
        {"enum": ["x" * 19_000, "y" * 19_000]},
        {"anyOf": [PERSON] * 700},
        {"not": PERSON},
        {"items": [PERSON]},
        {"$ref": "#/nowhere/a"},
        # What the reference leads to is not what stands under its name at the root.
        {"items": {"$id": "b:", "$ref": "#/$defs/x", "$defs": {"x": {"pattern": "a+"}}}, "$defs": {"x": PERSON}},
        {"$ref": "#/$defs/a~1b", "$defs": {"a~1b": PERSON, "a/b": {"pattern": "a+"}}},
        {"$ref": "#/$defs/%61", "$defs": {"%61": PERSON, "a": {"pattern": "a+"}}},
        {"type": "string", "maxLength": "4"},
        3,
    ],
)
def test_what_may_be_costly_or_wrong_is_not(schema: Any) -> None:
    assert not is_simple(json.dumps(schema))


def test_what_nests_deep_is_not_simple() -> None:
    schema: Any = {"type": "string"}
    for _ in range(50):
        schema = {"type": "array", "items": schema, "maxItems": 1}
    assert not is_simple(json.dumps(schema))
    assert not is_simple("[" * 10_000)
