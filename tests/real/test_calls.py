"""Tool calls and streams of Qwen2.5-Coder, with the settings that users have."""

import json
from typing import Any

import pytest

from tests.real.calls import post, streamed_lines
from tests.servers import TextGenerationServer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the current weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name of the city"}},
            "required": ["city"],
        },
    },
}
QUESTION = {"role": "user", "content": "What is the weather in Paris today? Use the tool."}
CHAT: dict[str, Any] = {"messages": [QUESTION], "tools": [WEATHER], "temperature": 0, "max_tokens": 200}


@pytest.mark.parametrize("tool_choice", ["required", "auto", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_question_for_one_city_is_one_call(qwen_server: TextGenerationServer, tool_choice: Any) -> None:
    choice = post(qwen_server, "/v1/chat/completions", CHAT | {"tool_choice": tool_choice})["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["get_weather"]
    assert json.loads(calls[0]["function"]["arguments"]) == {"city": "Paris"}
    assert choice["finish_reason"] == "tool_calls"


def test_a_question_without_need_of_a_tool_is_answered(qwen_server: TextGenerationServer) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": "Write a haiku about rain."}]}
    choice = post(qwen_server, "/v1/chat/completions", body)["choices"][0]
    assert not choice["message"].get("tool_calls")
    assert "rain" in choice["message"]["content"].lower()


def test_the_result_of_a_call_is_used(qwen_server: TextGenerationServer) -> None:
    """Offers no tools with the result, because this small model would repeat its call."""
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": '{"sky": "hail", "degrees": -37}'},
    ]
    body = {"messages": messages, "temperature": 0, "max_tokens": 200}
    choice = post(qwen_server, "/v1/chat/completions", body)["choices"][0]
    assert "37" in choice["message"]["content"]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [QUESTION]}),
        ("/v1/chat/completions", CHAT | {"tool_choice": "required"}),
        ("/v1/completions", {"prompt": "The capital of France is"}),
        ("/v1/responses", {"input": "Say hello.", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": [QUESTION], "max_tokens": 16}),
    ],
    ids=["chat", "chat with calls", "completions", "responses", "messages"],
)
def test_events_of_streams_have_a_space_after_the_colon(
    qwen_server: TextGenerationServer, path: str, body: dict[str, Any]
) -> None:
    limit = {} if "max_output_tokens" in body else {"max_tokens": 16}
    lines = streamed_lines(qwen_server, path, {**limit, "model": "qwen", **body, "stream": True})
    data = [line for line in lines if line.startswith("data")]
    assert data
    for line in data:
        assert line.startswith("data: "), line
        assert line == "data: [DONE]" or json.loads(line[6:])
