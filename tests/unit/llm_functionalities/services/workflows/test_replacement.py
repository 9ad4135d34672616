"""Replaced ingredients, with answers as models really send them: good, broken and adversarial."""

import json
import time

import pytest

from llm_functionalities.services.workflows import replacement
from tests.timing import on_a_busy_machine

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
@on_a_busy_machine
def test_the_ingredient_of_an_answer(text: str, named: Named) -> None:
    started = time.monotonic()
    found = replacement.parse_replacement(text, original="milk")
    assert (None if found is None else (found.name, found.amount)) == named
    assert time.monotonic() - started < 0.5


def test_the_longest_object_fits_into_the_tokens_even_at_one_token_a_character() -> None:
    longest = json.dumps({"name": "n" * replacement.LONGEST_NAME, "amount": "a" * replacement.LONGEST_AMOUNT})
    assert len(longest) <= replacement.OBJECT_TOKENS
