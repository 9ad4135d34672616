"""Bodies of /v1/chat/completions take what OpenAI's and TGI's clients send."""

from typing import Any

import pytest
from pydantic import ValidationError

from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.chat_tools import NamedTool, Tool, ToolChoice, ToolFunction


def request(*messages: dict[str, Any], **fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": list(messages) or [{"role": "user", "content": "hello"}], **fields})


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "hello"},
        {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}]},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "clock", "arguments": "{}"}}]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
        {"role": "assistant", "content": None, "reasoning_content": "It is noon."},
        {"role": "assistant", "reasoning": "It is noon."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]},
    ],
)
def test_a_message_says_something_in_one_of_its_forms(message: dict[str, Any]):
    (made,) = request(message).messages
    assert made.role == message["role"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user"},
        {"role": "user", "content": None},
        {"role": "assistant", "tool_calls": []},
        {"content": "hello"},
        {"role": "user", "content": [{"type": "sound"}]},
    ],
)
def test_a_message_without_a_role_or_content_is_refused(message: dict[str, Any]):
    with pytest.raises(ValidationError):
        request(message)


def test_openais_and_tgis_names_of_a_tools_parameters_mean_the_same():
    schema = {"type": "object"}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": "clock", name: schema}})
        for name in ("parameters", "arguments")
    ]
    assert tools[0] == tools[1]
    assert tools[0].function.arguments == schema


def test_a_tools_schema_comes_as_that_of_a_grammar_may():
    for schema, read in (('{"type": "object"}', {"type": "object"}), (True, {}), (None, None)):
        assert Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": schema}}).function == (
            ToolFunction(name="f", arguments=read)
        )
    with pytest.raises(ValidationError, match="not JSON"):
        Tool.model_validate({"type": "function", "function": {"name": "f", "parameters": "{"}})


@pytest.mark.parametrize("value", ["auto", "none", "required"])
def test_a_word_is_a_choice_of_its_own(value: str):
    assert ToolChoice.model_validate(value).root == value


@pytest.mark.parametrize(
    "value", ["clock", {"function": {"name": "clock"}}, {"type": "function", "function": {"name": "clock"}}]
)
def test_a_tool_is_chosen_by_its_name(value: Any):
    chosen = ToolChoice.model_validate(value).root
    assert isinstance(chosen, NamedTool)
    assert chosen.function.name == "clock"


def test_messages_are_bounded_in_number():
    with pytest.raises(ValidationError, match="at most 10000 items"):
        request(*[{"role": "user", "content": "a"}] * 10_001)
