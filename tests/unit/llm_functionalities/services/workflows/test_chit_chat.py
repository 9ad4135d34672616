"""Small talk, in prompts and answers."""

from llm_functionalities.services.numbers import decision_body
from llm_functionalities.services.workflows import chit_chat, execution_search
from shared.stubs import llm_pb2


def test_the_sentences_of_an_answer_are_bounded() -> None:
    said = chit_chat.parse(" ".join(f"This is sentence number {number} of a very long talk." for number in range(500)))
    assert said is not None
    assert len(said) <= chit_chat.CHARACTERS
    assert said.count(".") == chit_chat.SENTENCES


def test_nothing_is_asked_when_the_user_has_said_nothing() -> None:
    assert chit_chat.prompt(llm_pb2.LLMChitChatRequest(task_title="Pancakes", user_question=" ")) is None


def test_what_the_user_shows_is_seen_before_the_prompt() -> None:
    prompt = chit_chat.prompt(llm_pb2.LLMChitChatRequest(task_title="Pancakes", images=[b"\xff\xd8a"]))
    assert prompt is not None
    assert prompt.startswith("![](data:image/jpeg;base64,/9hh)Below is an instruction")
    choice = execution_search.choice(llm_pb2.ExecutionSearchRequest(user_question="Why?", images=[b"\xff\xd8a"]))
    assert choice is not None
    image, text = decision_body(choice)["input"][0]["content"]
    assert image == {"type": "input_image", "image_url": "data:image/jpeg;base64,/9hh"}
    assert text["text"] == "User: Why?"
