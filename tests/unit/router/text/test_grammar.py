import json
from typing import Any

import pytest

from tests.grammars import compiler_fault
from tgi_server.contract import Grammar, GrammarKind
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.schemas.grammar import GrammarType as RequestedGrammar
from tgi_server.router.text.grammar import requested_grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def grammar(**fields: Any) -> Grammar | None:
    return requested_grammar(RequestedGrammar.model_validate(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json", "value": json.dumps(SCHEMA)},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    ],
)
def test_a_json_schema_in_all_its_forms(fields: dict[str, Any]):
    made = grammar(**fields)
    assert made is not None
    assert made.type is GrammarKind.JSON_SCHEMA
    strict = fields.get("json_schema", {}).get("strict")
    assert json.loads(made.value) == SCHEMA | ({} if strict else {"additionalProperties": False})
    assert compiler_fault(made) is None


@pytest.mark.parametrize(
    ("form", "strict", "lenient"),
    [
        ("value", None, ()),
        ("value", False, ("#",)),
        ("json_schema", None, ("#",)),
        ("json_schema", False, ("#",)),
        ("json_schema", True, ()),
    ],
)
def test_constraints_may_be_left_to_the_model_where_it_says_so(form: str, strict: bool | None, lenient: Any):
    config = {"name": "x", "schema": SCHEMA} | ({} if strict is None else {"strict": strict})
    made = grammar(type="json_schema", **{form: config})
    assert made is not None
    assert made.lenient == lenient


def test_any_json_object():
    made = grammar(type="json_object")
    assert made is not None
    assert json.loads(made.value) == {"type": "object"}


def test_a_schema_without_properties_is_welcome():
    made = grammar(type="json", value={"type": "array", "items": {"type": "string"}})
    assert made is not None
    assert compiler_fault(made) is None


def test_regex_lark_and_plain_text():
    assert grammar(type="regex", value="a+") == Grammar(GrammarKind.REGEX, "a+")
    assert grammar(type="lark", value='start: "a"') == Grammar(GrammarKind.LARK, 'start: "a"')
    assert grammar(type="text") is None


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"type": "regex", "value": "a+"}, "response_format"),
        ({"type": "lark", "value": 'start: "a"'}, "response_format"),
        ({"type": "json", "value": {}}, "response_format.value"),
        ({"type": "json_schema", "json_schema": {"schema": {}}}, "response_format"),
    ],
)
def test_a_grammar_knows_the_field_that_asks_for_it(fields: dict[str, Any], place: str):
    made = grammar(**fields)
    assert made is not None
    assert made.place == place
    assert requested_grammar(None) is None


@pytest.mark.parametrize("value", ["{", 3, ["a"], "[]", "null", "[" * 5000])
def test_a_grammar_whose_schema_is_none_is_refused(value: Any):
    with pytest.raises(InvalidRequest, match="JSON"):
        grammar(type="json", value=value)


def test_a_json_schema_must_be_there():
    with pytest.raises(InvalidRequest, match="json_schema` is missing"):
        grammar(type="json_schema")


@pytest.mark.parametrize(
    "broken",
    [
        Grammar(GrammarKind.REGEX, "["),
        Grammar(GrammarKind.REGEX, "(?=a)"),
        Grammar(GrammarKind.LARK, "start: absent"),
        Grammar(GrammarKind.JSON_SCHEMA, '{"type": "strange"}'),
        Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/schema"}'),
    ],
)
def test_what_cannot_be_compiled_is_told_in_one_line(broken: Grammar):
    fault = compiler_fault(broken)
    assert fault
    assert "\n" not in fault
