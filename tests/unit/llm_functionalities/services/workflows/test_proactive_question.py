"""Questions that an answer may or may not have."""

import pytest

from llm_functionalities.services.workflows import proactive_question


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
def test_the_first_question_of_an_answer(text: str, question: str | None) -> None:
    assert proactive_question.parse(text) == question


def test_nothing_is_asked_about_nothing() -> None:
    assert proactive_question.prompt("", " ", "") is None
