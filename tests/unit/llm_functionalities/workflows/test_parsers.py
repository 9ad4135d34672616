"""The workflows' parsers, with what models really send: good, broken and adversarial answers."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from llm_functionalities.workflows import (
    chit_chat,
    description,
    execution_search,
    proactive_question,
    replacement,
    summary,
)
from shared.stubs import llm_pb2

Named = tuple[str, str] | None

REPLACEMENTS: list[tuple[str, Named]] = [
    ('{"name": "oat milk", "amount": "200 ml"}', ("oat milk", "200 ml")),
    ('{"amount": "200 ml", "name": "oat milk"}', ("oat milk", "200 ml")),
    ('Sure! Here it is:\n```json\n{"name": "oat milk", "amount": "200 ml"}\n```', ("oat milk", "200 ml")),
    ('{"name": "oat milk", "amount": "200 ml"} {"name": "soy milk", "amount": "1 l"}', ("oat milk", "200 ml")),
    ('{"name": "oat milk"}', ("oat milk", "")),
    ('{"name": "eggs", "amount": 2}', ("eggs", "2")),
    ('{"name": "eggs", "amount": null}', ("eggs", "")),
    ('{"name": "  oat \\n milk ", "amount": " 200  ml "}', ("oat milk", "200 ml")),
    ('{ "name" : "crème fraîche", "amount": "½ cup" }', ("crème fraîche", "½ cup")),
    ('{"unfinished": {"name": "oat milk", "amount": "1"}', ("oat milk", "1")),
    ("", None),
    ("{}", None),
    ("[]", None),
    ("null", None),
    ("oat milk", None),
    ('{"name": "", "amount": "200 ml"}', None),
    ('{"name": "   "}', None),
    ('{"amount": "200 ml"}', None),
    ('{"name": null}', None),
    ('{"name": true}', None),
    ('{"name": ["oat milk"]}', None),
    ('{"name": {"name": "oat milk"}}', None),
    ('{"name": "oat mi', None),
    (' "oat milk", "amount": "200 ml"}', None),
    ('{"name": "Milk", "amount": "200 ml"}', None),  # what was to be replaced
    ('{"name": "' + "very " * 100 + 'long"}', None),
    ('{"name": "oat\\u0000milk"}', None),
    ('{"name": "oat milk", "amount": "' + "9" * 100 + '"}', ("oat milk", "")),
    ('{"name": "oat milk", "amount": 1' + "0" * 5000 + "}", None),
    ("{" * 100_000, None),
    ('{"a":' * 100_000, None),
    ("[" * 100_000 + '{"name": "oat milk"}', None),
    ('{"name": "oat milk", "amount": NaN}', ("oat milk", "nan")),
]


@pytest.mark.parametrize(("text", "named"), REPLACEMENTS)
def test_replacement(text: str, named: Named) -> None:
    started = time.monotonic()
    found = replacement.parse_replacement(text, original="milk")
    assert (None if found is None else (found.name, found.amount)) == named
    assert time.monotonic() - started < 0.5


SEARCH, CONTINUE, ASK = execution_search.INTENTS

DECISIONS: list[tuple[str, Named]] = [
    (json.dumps({"intent": SEARCH, "ai_response": "Shall we look for pizza?"}), (SEARCH, "Shall we look for pizza?")),
    (json.dumps({"intent": CONTINUE}), (CONTINUE, "")),
    (json.dumps({"intent": ASK, "ai_response": "Do you mean the sauce? Or the"}), (ASK, "Do you mean the sauce?")),
    (json.dumps({"intent": ASK, "ai_response": 7}), (ASK, "")),
    (f"The intent is {SEARCH}.", (SEARCH, "")),
    (f"{SEARCH}()", (SEARCH, "")),
    (f'"{CONTINUE}"}}', (CONTINUE, "")),  # only the second half of an object
    (f'{{"intent": "{CONTINUE}", "ai_resp', (CONTINUE, "")),
    (f"{SEARCH} or {CONTINUE}", None),
    (json.dumps({"intent": "order_pizza"}), None),
    (json.dumps({"intent": None}), None),
    (json.dumps({"intent": [SEARCH]}), None),
    (json.dumps({"intent": {"intent": SEARCH}}), None),
    (f"{SEARCH}_now", None),
    ("", None),
    ("{}", None),
]


@pytest.mark.parametrize(("text", "decided"), DECISIONS)
def test_decision(text: str, decided: Named) -> None:
    found = execution_search.parse(text)
    assert (None if found is None else (found.intent_classification, found.ai_response)) == decided


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("How does the sauce taste?", "How does the sauce taste?"),
        ("Sure! How does the sauce taste? Let me know.", "How does the sauce taste?"),
        ("Question: How is it going? Is it hot?", "Question: How is it going?"),
        ("How does the sauce", None),
        ("I like sauce.", None),
        ("", None),
        ("???", None),
        ("Why " + "oh " * 100 + "why? Is it hot?", "Is it hot?"),
        ("### Response:\nIs it hot?\n### Instruction:\nAsk again?", "Is it hot?"),
    ],
)
def test_question(text: str, question: str | None) -> None:
    assert proactive_question.parse(text) == question


BUTTER = llm_pb2.ReplacedIngredient(
    original=llm_pb2.Ingredient(name="butter"), replacement=llm_pb2.Ingredient(name="peanut butter")
)
EGGS = llm_pb2.ReplacedIngredient(
    original=llm_pb2.Ingredient(name="egg"), replacement=llm_pb2.Ingredient(name="banana")
)


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("Melt the peanut butter.", "Melt the peanut butter."),
        ("Melt the peanut butter. Then stir in the ban", "Melt the peanut butter."),
        ("Melt the butter.", None),
        ("Melt the peanut butter and the butter.", None),
        ("Beat the eggs.", None),
        ("Beat the EGG.", None),
        ("Peel the eggplant.", "Peel the eggplant."),
        ("", None),
        ("Melt it", None),
    ],
)
def test_rewritten_step(text: str, step: str | None) -> None:
    assert replacement.parse_step(text, [BUTTER, EGGS]) == step


PARSERS: list[Callable[[str], Any]] = [
    chit_chat.parse,
    summary.parse,
    description.parse,
    proactive_question.parse,
    replacement.parse_replacement,
    execution_search.parse,
    lambda text: replacement.parse_step(text, [BUTTER]),
]
PIECES = [
    '{"name": "',
    '"intent":',
    "}",
    "{",
    '"',
    "### ",
    "\n",
    "recommend_new_search",
    ". ",
    "? ",
    "\\u",
    "```",
    "1. ",
]


@pytest.mark.parametrize("parse", PARSERS)
@given(st.one_of(st.text(max_size=200), st.lists(st.sampled_from(PIECES), max_size=20).map("".join)))
def test_no_answer_makes_a_parser_raise(parse: Callable[[str], Any], text: str) -> None:
    parse(text)


@pytest.mark.parametrize("parse", PARSERS)
def test_an_empty_answer_is_no_answer(parse: Callable[[str], Any]) -> None:
    assert parse("") is None


@pytest.mark.parametrize("parse", [chit_chat.parse, summary.parse, description.parse])
def test_spoken_answers_are_bounded(parse: Callable[[str], str | None]) -> None:
    said = parse(" ".join(f"This is sentence number {number} of a very long talk." for number in range(500)))
    assert said is not None
    assert len(said) <= 400
    assert said.count(".") <= 3


@pytest.mark.parametrize("grammar", [replacement.REPLACEMENT, execution_search.DECISION])
def test_schemas_are_valid_and_bound_what_they_allow(grammar: Any) -> None:
    Draft202012Validator.check_schema(grammar.json_schema)
    for value in grammar.json_schema["properties"].values():
        assert "maxLength" in value or "enum" in value


def test_the_longest_allowed_objects_fit_into_the_tokens_even_at_one_token_a_character() -> None:
    longest = json.dumps({"name": "n" * replacement.LONGEST_NAME, "amount": "a" * replacement.LONGEST_AMOUNT})
    assert len(longest) <= replacement.OBJECT_TOKENS
    longest = json.dumps({"intent": max(execution_search.INTENTS, key=len), "ai_response": "r" * 200})
    assert len(longest) <= execution_search.MAX_TOKENS
