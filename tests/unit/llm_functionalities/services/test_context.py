"""Grammars as callers send them."""

import pytest

from llm_functionalities.endpoint.generation import Grammar
from llm_functionalities.errors import UnusableGrammar
from llm_functionalities.services.context import grammar_of
from shared.stubs import llm_pb2


def test_a_request_without_a_grammar_has_none() -> None:
    assert grammar_of(llm_pb2.ModelRequest().grammar) is None
    assert grammar_of(llm_pb2.Grammar()) is None


def test_a_grammar_is_a_schema_or_a_regular_expression() -> None:
    assert grammar_of(llm_pb2.Grammar(regex="[0-9]+")) == Grammar(regex="[0-9]+")
    assert grammar_of(llm_pb2.Grammar(json_schema='{"type": "object"}')) == Grammar(json_schema={"type": "object"})


@pytest.mark.parametrize("text", ["", "{", "7", "[]", '"text"', "[" * 100_000, '{"a": "' + "x" * 200_000 + '"}'])
def test_a_grammar_that_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(UnusableGrammar, match="json_schema"):
        grammar_of(llm_pb2.Grammar(json_schema=text))


def test_an_empty_regex_is_refused() -> None:
    with pytest.raises(UnusableGrammar, match="regex"):
        grammar_of(llm_pb2.Grammar(regex=""))


@pytest.mark.parametrize(
    "regex", ["(a", "a)", "[a", "*a", "a{2,1}", "(?P<a", "a{99999999999999999999}", "(" * 2000, "\\"]
)
def test_a_regex_that_is_none_is_refused(regex: str) -> None:
    with pytest.raises(UnusableGrammar, match="regex is not a regular expression: "):
        grammar_of(llm_pb2.Grammar(regex=regex))


@pytest.mark.parametrize("regex", [r"\p{Greek}+", "[[a]", "(?i)yes|no", "(" * 100_000])
def test_a_regex_that_a_server_may_take_is_passed_on(regex: str) -> None:
    assert grammar_of(llm_pb2.Grammar(regex=regex)) == Grammar(regex=regex)


def test_a_grammar_that_is_very_long_is_refused() -> None:
    with pytest.raises(UnusableGrammar, match="200000 characters; it must have at most 131072"):
        grammar_of(llm_pb2.Grammar(regex="x" * 200_000))
