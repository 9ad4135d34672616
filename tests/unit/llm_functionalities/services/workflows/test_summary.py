"""Summaries of answers, and of nothing."""

from llm_functionalities.services.workflows import summary


def test_the_sentences_of_an_answer_are_bounded() -> None:
    said = summary.parse(" ".join(f"This is sentence number {number} of a very long talk." for number in range(500)))
    assert said is not None
    assert len(said) <= summary.CHARACTERS
    assert said.count(".") == summary.SENTENCES


def test_nothing_is_asked_about_nothing() -> None:
    assert summary.prompt("Pancakes", " ", "") is None
