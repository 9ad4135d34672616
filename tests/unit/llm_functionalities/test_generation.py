import json

import pytest

from llm_functionalities.errors import InvalidGrammar
from llm_functionalities.generation import Grammar
from shared.stubs import llm_pb2


def test_a_request_without_a_grammar_has_none() -> None:
    assert Grammar.of_request(llm_pb2.ModelRequest().grammar) is None
    assert Grammar.of_request(llm_pb2.Grammar()) is None


def test_the_forms_of_the_text_generation_api() -> None:
    regex = Grammar.of_request(llm_pb2.Grammar(regex="[0-9]+"))
    assert regex is not None
    assert regex.payload == {"type": "regex", "value": "[0-9]+"}
    schema = Grammar.of_request(llm_pb2.Grammar(json_schema='{"type": "object"}'))
    assert schema is not None
    assert schema.payload == {"type": "json", "value": {"type": "object"}}


def test_a_null_in_a_schema_is_not_lost() -> None:
    schema = {"properties": {"a": {"const": None}}}
    grammar = Grammar.of_request(llm_pb2.Grammar(json_schema=json.dumps(schema)))
    assert grammar is not None
    value = grammar.payload["value"]
    assert isinstance(value, str)
    assert json.loads(value) == schema


@pytest.mark.parametrize("text", ["", "{", "7", "[]", '"text"', "[" * 100_000, '{"a": "' + "x" * 200_000 + '"}'])
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(InvalidGrammar, match="json_schema"):
        Grammar.of_request(llm_pb2.Grammar(json_schema=text))


def test_an_empty_regex_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="regex"):
        Grammar.of_request(llm_pb2.Grammar(regex=""))


def test_a_grammar_that_is_very_long_is_refused() -> None:
    with pytest.raises(InvalidGrammar, match="200000 characters; it must have at most 131072"):
        Grammar.of_request(llm_pb2.Grammar(regex="x" * 200_000))
