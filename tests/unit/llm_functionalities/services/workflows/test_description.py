"""Descriptions of answers, and of nothing."""

from llm_functionalities.services.workflows import description


def test_the_sentences_of_an_answer_are_bounded() -> None:
    said = description.parse(
        " ".join(f"This is sentence number {number} of a very long talk." for number in range(500))
    )
    assert said is not None
    assert len(said) <= description.CHARACTERS
    assert said.count(".") == description.SENTENCES


def test_nothing_is_asked_about_nothing() -> None:
    assert description.prompt(" ", "flour") is None
