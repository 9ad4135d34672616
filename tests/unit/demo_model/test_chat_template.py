"""The chat template of the demo model, as `transformers` renders it."""

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from tgi_server import demo_model
from tools.demo_model import layout
from tools.demo_model.exchange import Exchange

SYSTEM = {"role": "system", "content": "You are a cook."}
USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hi!"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model.PATH)


def render(tokenizer, messages: list[dict], prompt: bool = True, **options: object) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **options)


def test_a_question_asks_for_the_assistant(tokenizer) -> None:
    assert render(tokenizer, [USER]) == "<|bos|><|user|>Hello<|assistant|>"
    assert render(tokenizer, [USER], prompt=False) == "<|bos|><|user|>Hello"


def test_a_conversation_with_a_system_message(tokenizer) -> None:
    assert render(tokenizer, [SYSTEM, USER, ASSISTANT, USER]) == (
        "<|bos|><|system|>You are a cook.<|user|>Hello<|assistant|>Hi!<|eos|><|user|>Hello<|assistant|>"
    )


def test_it_writes_what_the_model_was_trained_on(tokenizer) -> None:
    document = layout.chat(
        [Exchange("Hello", "Hi!"), Exchange("What is this?", "A pan.", "a picture")], "You are a cook."
    )
    messages = [
        SYSTEM,
        USER,
        ASSISTANT,
        {"role": "user", "content": "What is this?\na picture"},
        {"role": "assistant", "content": "A pan."},
    ]
    assert render(tokenizer, messages, prompt=False) == "".join(piece.text for piece in document)


def test_content_may_come_in_parts(tokenizer) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert render(tokenizer, [{"role": "user", "content": parts}]) == "<|bos|><|user|>Hello<|assistant|>"


def test_tools_stand_in_the_system_turn(tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "set_timer", "parameters": {"type": "object"}}}
    told = 'Tools:\n{"name": "set_timer", "parameters": {"type": "object"}}'
    assert render(tokenizer, [USER], tools=[tool]).startswith(f"<|bos|><|system|>{told}<|user|>")
    assert render(tokenizer, [SYSTEM, USER], tools=[tool]).startswith(
        f"<|bos|><|system|>You are a cook.\n{told}<|user|>"
    )


def test_a_call_and_its_result(tokenizer) -> None:
    call = {"id": "0", "type": "function", "function": {"name": "set_timer", "arguments": '{"minutes": 5}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "done"}]
    assert render(tokenizer, messages) == (
        '<|bos|><|user|>Hello<|assistant|>{"name": "set_timer", "arguments": {"minutes": 5}}<|eos|>'
        "<|tool|>done<|assistant|>"
    )


def test_an_unknown_role_is_refused(tokenizer) -> None:
    with pytest.raises(TemplateError, match="not narrator"):
        render(tokenizer, [{"role": "narrator", "content": "Once upon a time"}])
