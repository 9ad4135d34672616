"""Every keyword of JSON Schema is enforced or refused: none is passed over."""

import json
from typing import Any

import jsonschema
import pytest

from tests.grammars import demo_compiler
from tests.unit.engine.grammar.acceptance import accepts
from tests.unit.engine.grammar.keyword_cases import ANNOTATIONS, ENFORCED, REFUSED, REFUSED_FORMATS, Group
from tests.unit.engine.grammar.keyword_table import keyword_table, table_in_document
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.engine.grammar import InvalidGrammar, json_schema

ENFORCED_CASES = [
    pytest.param(group, id=f"{name} {i}") for name, groups in ENFORCED.items() for i, group in enumerate(groups)
]


def grammar(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


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
    if "x-span" in json.dumps(case) or case["schema"].get("format") not in (None, "date", "ipv4", "ipv6", "uuid"):
        return  # what `jsonschema` does not know
    draft = jsonschema.Draft7Validator if "additionalItems" in case["schema"] else jsonschema.Draft202012Validator
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for test in case["tests"]:
        assert draft(case["schema"], format_checker=checker).is_valid(test["data"]) is test["valid"], test


@pytest.mark.parametrize("keyword", ANNOTATIONS)
def test_annotations_say_nothing(keyword: str) -> None:
    schema = {"type": "integer", keyword: ANNOTATIONS[keyword]}
    assert accepts(demo_compiler(), grammar(schema), "1")
    assert not accepts(demo_compiler(), grammar(schema), '"a"')


@pytest.mark.parametrize("keyword", REFUSED)
def test_refused_by_name(keyword: str) -> None:
    told = fault({"type": "object", "properties": {"p": {keyword: REFUSED[keyword]}}})
    assert repr(keyword) in told
    assert "#/properties/p" in told


@pytest.mark.parametrize("name", REFUSED_FORMATS)
def test_formats_refused_by_name(name: str) -> None:
    assert name in fault({"type": "string", "format": name})


def test_every_keyword_is_in_the_table() -> None:
    told = {name for name in [*ENFORCED, *ANNOTATIONS] if ":" not in name} | {"format"}
    assert told == json_schema.ENFORCED | json_schema.ANNOTATIONS
    formats = {name.removeprefix("format: ") for name in ENFORCED if name.startswith("format: ")}
    assert formats == set(json_schema.FORMATS)


def test_the_table_in_the_documentation_is_this_one() -> None:
    """python -m tests.unit.engine.grammar.keyword_table writes it."""
    assert table_in_document() == keyword_table()


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"type": "strange"}, "strange"),
        ({"properties": {"a": 3}}, "#/properties/a"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"enum": []}, "empty"),
        (False, "false"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(schema: Any, told: str) -> None:
    line = fault(schema)
    assert told in line
    assert "\n" not in line
