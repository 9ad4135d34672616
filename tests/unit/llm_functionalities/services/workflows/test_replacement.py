"""Replaced ingredients and rewritten steps, with answers as models really send them: good, broken and adversarial."""

import json
import time

import pytest

from llm_functionalities.services.workflows import replacement
from llm_functionalities.services.workflows.replacement import Words
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
def test_the_ingredient_of_an_answer(text: str, named: Named) -> None:
    started = time.monotonic()
    found = replacement.parse_replacement(text, original="milk")
    assert (None if found is None else (found.name, found.amount)) == named
    assert time.monotonic() - started < 0.5


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
def test_a_rewritten_step_is_free_of_what_was_replaced(text: str, step: str | None) -> None:
    assert replacement.parse_step(text, [BUTTER, EGGS]) == step


@pytest.mark.parametrize(
    ("text", "name", "mentioned"),
    [
        ("Add the oat milk.", "oat milk", True),
        ("Add the OAT  milk, then stir.", "Oat Milk", True),
        ("Add all-purpose flour.", "all purpose flour", True),
        ("Beat two eggs.", "egg", True),
        ("Slice the tomatoes.", "tomato", True),
        ("Slice the eggplant.", "egg", False),
        ("Fill the boat.", "oat", False),
        ("Use crème fraîche.", "CRÈME FRAÎCHE", True),
        ("Stir.", "", False),
        ("Stir.", "()", False),
        ("", "salt", False),
    ],
)
def test_a_step_mentions_an_ingredient_by_its_words(text: str, name: str, mentioned: bool) -> None:
    assert Words(text).mention(Words(name)) is mentioned


def test_a_name_within_another_is_no_mention_of_its_own() -> None:
    peanut, butter = Words("peanut butter"), Words("butter")
    assert not Words("Melt peanut butter, peanut butter and peanut butters.").mention_beside(butter, peanut)
    assert Words("Melt peanut butter and butter.").mention_beside(butter, peanut)


def test_the_longest_object_fits_into_the_tokens_even_at_one_token_a_character() -> None:
    longest = json.dumps({"name": "n" * replacement.LONGEST_NAME, "amount": "a" * replacement.LONGEST_AMOUNT})
    assert len(longest) <= replacement.OBJECT_TOKENS
