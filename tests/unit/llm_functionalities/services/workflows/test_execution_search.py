"""Decisions, with answers as models really send them: good, broken and adversarial."""

import json

import pytest

from llm_functionalities.services.workflows import execution_search

Named = tuple[str, str] | None


SEARCH, CONTINUE, ASK = execution_search.INTENTS

DECISIONS: list[tuple[str, Named]] = [
    (json.dumps({"intent": SEARCH, "ai_response": "Shall we look for pizza?"}), (SEARCH, "Shall we look for pizza?")),
    (json.dumps({"intent": CONTINUE}), (CONTINUE, "")),
    (json.dumps({"intent": ASK, "ai_response": "Do you mean the sauce? Or the"}), (ASK, "Do you mean the sauce?")),
    (json.dumps({"intent": ASK, "ai_response": 7}), (ASK, "")),
    (json.dumps({"intent": ASK, "ai_response": "Which one \ud83d?"}), (ASK, "Which one ?")),
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
def test_the_decision_of_an_answer(text: str, decided: Named) -> None:
    found = execution_search.parse(text)
    assert (None if found is None else (found.intent_classification, found.ai_response)) == decided


def test_the_longest_object_fits_into_the_tokens_even_at_one_token_a_character() -> None:
    longest = json.dumps({"intent": max(execution_search.INTENTS, key=len), "ai_response": "r" * 200})
    assert len(longest) <= execution_search.MAX_TOKENS
