"""Small talk, in prompts and answers."""

from llm_functionalities.services.workflows import chit_chat
from shared.stubs import llm_pb2


def test_the_sentences_of_an_answer_are_bounded() -> None:
    said = chit_chat.parse(" ".join(f"This is sentence number {number} of a very long talk." for number in range(500)))
    assert said is not None
    assert len(said) <= chit_chat.CHARACTERS
    assert said.count(".") == chit_chat.SENTENCES


def test_nothing_is_asked_when_the_user_has_said_nothing() -> None:
    assert chit_chat.prompt(llm_pb2.LLMChitChatRequest(task_title="Pancakes", user_question=" ")) is None
