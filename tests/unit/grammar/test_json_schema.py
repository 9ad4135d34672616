"""Keywords of JSON Schema that are enforced, ignored, refused, or left to the model."""

import json
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from tests.grammars import compiler_fault, demo_compiler, left_to_model
from tests.unit.grammar.acceptance import accepts
from tests.unit.grammar.keyword_cases import ANNOTATIONS, ENFORCED, LEFT, REFUSED, Group
from tests.unit.grammar.keyword_table import keyword_table, table_in_document
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.grammar import InvalidGrammar, json_schema

ENFORCED_CASES = [
    pytest.param(group, id=f"{name} {i}") for name, groups in ENFORCED.items() for i, group in enumerate(groups)
]


def grammar(schema: Any, *lenient: str) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema), lenient=lenient)


def left_out(schema: Any, *lenient: str) -> tuple[str, ...]:
    demo_compiler().check(grammar(schema, *lenient))
    return left_to_model(grammar(schema, *lenient))


def fault(schema: Any) -> str:
    with pytest.raises(InvalidGrammar) as refusal:
        demo_compiler().check(grammar(schema))
    return str(refusal.value)


@pytest.mark.parametrize("case", ENFORCED_CASES)
def test_enforced(case: Group) -> None:
    for test in case["tests"]:
        text = json.dumps(test["data"], ensure_ascii=False)
        assert accepts(demo_compiler(), grammar(case["schema"]), text) is test["valid"], text


@pytest.mark.parametrize("case", ENFORCED_CASES)
def test_the_cases_say_what_jsonschema_says(case: Group) -> None:
    unknown = case["schema"].get("format") not in (None, "date", "ipv4", "ipv6", "uuid", "regex", "idn-email")
    annotated = any(keyword in json.dumps(case) for keyword in ("x-span", "x-lark"))
    if unknown or annotated or "nullable" in case["schema"]:
        return  # what `jsonschema` does not know
    earlier = any(f'"{keyword}"' in json.dumps(case) for keyword in ("additionalItems", "dependencies"))
    draft = jsonschema.Draft7Validator if earlier else jsonschema.Draft202012Validator
    if "$recursiveRef" in json.dumps(case):
        draft = jsonschema.Draft201909Validator
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for test in case["tests"]:
        assert draft(case["schema"], format_checker=checker).is_valid(test["data"]) is test["valid"], test


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_annotations_say_nothing(keyword: str) -> None:
    schema = {"type": "integer", keyword.partition(":")[0]: ANNOTATIONS[keyword]}
    assert accepts(demo_compiler(), grammar(schema), "1")
    assert not accepts(demo_compiler(), grammar(schema), '"a"')


@pytest.mark.parametrize("name", LEFT)
def test_what_is_always_left_to_the_model_is_named(name: str) -> None:
    assert left_out(LEFT[name]) == ("uniqueItems at #",)


def test_a_set_of_pydantic_is_taken() -> None:
    class Recipe(BaseModel):
        tags: set[str]

    schema = Recipe.model_json_schema()
    assert left_out(schema) == ("uniqueItems at #/properties/tags",)
    assert accepts(demo_compiler(), grammar(schema), '{"tags": ["a", "b"]}')
    assert not accepts(demo_compiler(), grammar(schema), '{"tags": ["a", 1]}')


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(name: str) -> None:
    keyword, schema = REFUSED[name]
    message = fault({"type": "object", "properties": {"p": schema}})
    assert repr(keyword) in message
    assert "#/properties/p" in message


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_enforced_is_left_to_the_model_where_that_will_do(name: str) -> None:
    keyword, schema = REFUSED[name]
    whole = {"type": "object", "properties": {"p": schema, "q": {"type": "integer"}}, "required": ["q"]}
    assert left_out(whole, "#") == (f"{keyword} at #/properties/p",)
    assert left_out({"$defs": {"d": whole}, "$ref": "#/$defs/d"}, "#/$defs/d") == (
        f"{keyword} at #/$defs/d/properties/p",
    )
    assert not accepts(demo_compiler(), grammar(whole, "#"), '{"q": "a"}')
    if keyword != "$dynamicRef":  # whose places are elsewhere
        assert repr(keyword) in fault({"$defs": {"d": whole}, "allOf": [{"$ref": "#/$defs/d"}, True]})


def test_one_of_is_any_of_where_it_is_left_to_the_model() -> None:
    schema = REFUSED["oneOf of a variant within another"][1]
    assert accepts(demo_compiler(), grammar(schema, "#"), "1")
    assert not accepts(demo_compiler(), grammar(schema, "#"), '"a"')


@pytest.mark.parametrize(
    ("schema", "left"),
    [
        ({"type": "object", "properties": {"a": {"type": "any"}}}, "type at #/properties/a"),
        ({"type": "object", "properties": {"a": {"required": True}}}, "required at #/properties/a"),
        ({"type": "object", "properties": {"a": 3}}, "all at #"),
        ({"type": "object", "patternProperties": {"a": {}, "b": {}}}, "patternProperties at #"),
    ],
)
def test_schemas_that_are_not_well_formed_are_taken_as_far_as_they_are(schema: Any, left: str) -> None:
    assert left in left_out(schema, "#")
    assert accepts(demo_compiler(), grammar(schema, "#"), "{}")
    assert not accepts(demo_compiler(), grammar(schema, "#"), "1")
    assert fault(schema)


def test_one_part_that_cannot_be_compiled_takes_no_other_along() -> None:
    good = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 3}}, "additionalProperties": False}
    bad = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["n"]}
    schema = {"anyOf": [{"$ref": "#/$defs/good"}, {"$ref": "#/$defs/bad"}], "$defs": {"good": good, "bad": bad}}
    schema["allOf"] = [{"properties": {"b": {"$ref": "#/$defs/bad"}}, "required": ["b"]}]
    assert left_out(schema, "#/$defs/good", "#/$defs/bad") == ("all at #/$defs/bad",)


def test_no_name_is_written_in_two_ways() -> None:
    """A reader of JSON takes the last of them, which would be bound by nothing."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert accepts(demo_compiler(), grammar(schema), '{"a": 1, "b": 2}')
    assert not accepts(demo_compiler(), grammar(schema), '{"a": 1, "\\u0061": "x"}')


def test_every_keyword_is_in_the_table() -> None:
    tested = {keyword for name, groups in ENFORCED.items() for each in groups for keyword in _keywords(each["schema"])}
    assert tested >= json_schema.KEYWORDS
    assert {keyword for name in ENFORCED for keyword in name.replace(":", " ").split()} >= json_schema.KEYWORDS
    formats = {name.removeprefix("format: ") for name in ENFORCED if name.startswith("format: ")}
    assert formats == set(json_schema.FORMATS)


def _keywords(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(_keywords, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    return set(schema).union(*map(_keywords, schema.values()))


def test_the_table_in_the_documentation_is_this_one() -> None:
    """python -m tests.unit.grammar.keyword_table writes it."""
    assert table_in_document() == keyword_table()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"type": "strange"}, "strange"),
        ({"properties": {"a": 3}}, "#/properties/a"),
        ({"const": 1e300}, "too large"),
        ('{"minimum": NaN}', "NaN"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"enum": []}, "empty"),
        (False, "false"),
    ],
)
def test_what_cannot_be_used_is_reported_in_one_line(schema: Any, message: str) -> None:
    line = fault(schema) if not isinstance(schema, str) else compiler_fault(Grammar(GrammarKind.JSON_SCHEMA, schema))
    assert line is not None
    assert message in line
    assert "\n" not in line
