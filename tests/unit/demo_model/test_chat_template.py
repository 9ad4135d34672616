"""The chat template of the demo model, as `transformers` renders it."""

import json
import re

import pytest
from jinja2.exceptions import TemplateError

from tgi_server import demo_model

SYSTEM = {"role": "system", "content": "You are a cook."}
USER = {"role": "user", "content": "Hello"}
ASSISTANT = {"role": "assistant", "content": "Hi!"}


def render(tokenizer, messages: list[dict], prompt: bool = True, **options: object) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, **options)


def test_a_question_asks_for_the_assistant(tokenizer) -> None:
    assert render(tokenizer, [USER]) == "<|bos|><|user|>Hello<|assistant|>"
    assert render(tokenizer, [USER], prompt=False) == "<|bos|><|user|>Hello"


def test_a_conversation_with_a_system_message(tokenizer) -> None:
    assert render(tokenizer, [SYSTEM, USER, ASSISTANT, USER]) == (
        "<|bos|><|system|>You are a cook.<|user|>Hello<|assistant|>Hi!<|eos|><|user|>Hello<|assistant|>"
    )


def test_the_template_writes_what_the_model_was_trained_on(tokenizer) -> None:
    documents = ["".join(json.loads(line)) for line in demo_model.HELD_OUT.read_text().splitlines()]
    conversations = [
        document for document in documents if document.startswith(("<|bos|><|user|>", "<|bos|><|system|>"))
    ]
    assert len(conversations) > 50
    for conversation in conversations:
        turns = re.findall(r"<\|(system|user|assistant)\|>([^<]*)", conversation)
        messages = [{"role": role, "content": content} for role, content in turns]
        assert render(tokenizer, messages, prompt=False) == conversation


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
