"""Readings of JSON schemas without types and without `additionalProperties`."""

from typing import Any

import pytest

from tests.grammars import takes
from tgi_server.router.text.grammar import json_grammar

A = {"a": {"type": "integer"}}
BASE = {"$defs": {"Base": {"type": "object", "properties": A, "required": ["a"]}}}


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"properties": A, "required": ["a"]}, ['{"a": 1}'], ["null", "3", '{"a": 1, "b": 2}']),
        ({"type": "object", "properties": {"x": {"properties": A}}}, ['{"x": {"a": 1}}', "{}"], ['{"x": {"b": 1}}']),
        ({"type": "array", "items": {"properties": A}}, ['[{"a": 1}]'], ['[{"b": 1}]', "[null]"]),
        ({"properties": A, "additionalProperties": True}, ['{"a": 1, "b": 2}'], ["null"]),
        ({"properties": A, "required": ["b"]}, ['{"a": 1, "b": 2}'], ["{}"]),
        ({"type": ["object", "null"], "properties": A}, ["null", '{"a": 1}'], ['{"b": 1}']),
        ({"type": "object"}, ['{"b": 1}'], ["null"]),
        ({**BASE, "$ref": "#/$defs/Base"}, ['{"a": 1}'], ['{"a": 1, "b": 2}']),
        (
            {
                **BASE,
                "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"b": {"type": "integer"}}, "required": ["b"]}],
            },
            ['{"a": 1, "b": 2}'],
            ["null", '{"a": 1}'],
        ),
        (
            {"anyOf": [{"properties": A, "required": ["a"]}, {"type": "null"}]},
            ["null", '{"a": 1}'],
            ['{"a": 1, "b": 2}'],
        ),
        ({"properties": A, "anyOf": [{"required": ["a"]}]}, ['{"a": 1}'], ['{"a": 1, "b": 2}', "{}"]),
        ({"enum": [None, {"a": 1}], "properties": A}, ["null"], ["3"]),
    ],
    ids=str,
)
def test_objects_are_closed_unless_they_are_opened(schema: Any, taken: list[str], refused: list[str]) -> None:
    grammar = json_grammar(schema)
    assert grammar.reading == "closed-objects"
    for text in taken:
        assert takes(grammar, text)
    for text in refused:
        assert not takes(grammar, text)


def test_a_strict_schema_is_read_by_the_letter() -> None:
    grammar = json_grammar({"properties": A}, strict=True)
    assert grammar.reading == "json-schema"
    for text in ("null", '{"a": 1, "b": 2}'):
        assert takes(grammar, text)
