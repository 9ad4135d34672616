"""Every number that a client may give has bounds, and they fit the messages to the shards."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.compatibility import VertexRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import CompatGenerateRequest, GenerateRequest
from tgi_server.router.schemas.messages import MessagesRequest
from tgi_server.router.schemas.responses import ResponsesRequest

LARGEST = {"seed": 2**64 - 1}
SMALLEST = {"seed": -(2**63)}


def properties(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and schemas of all members, however deep."""
    if isinstance(schema, list):
        for each in schema:
            yield from properties(each)
    elif isinstance(schema, dict):
        yield from schema.get("properties", {}).items()
        for each in schema.values():
            yield from properties(each)


@pytest.mark.parametrize(
    "model", [GenerateRequest, CompatGenerateRequest, ChatRequest, CompletionRequest, VertexRequest]
)
def test_numbers_and_lists_are_bounded(model: type[BaseModel]):
    numbers = 0
    for name, schema in properties(model.model_json_schema()):
        for kind in schema.get("anyOf", [schema]):
            if kind.get("type") == "integer":
                numbers += 1
                assert kind.get("minimum", -1) >= SMALLEST.get(name, -(2**31)), name
                assert kind["maximum"] <= LARGEST.get(name, 2**32 - 1), name
            if kind.get("type") == "array" and name != "logit_bias":  # a list of it has as many as there are tokens
                assert "maxItems" in kind, name
    assert numbers >= 6


@pytest.mark.parametrize(
    ("model", "content"),
    [
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache": None}]}]}),
        (
            ChatRequest,
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:", "detail": None}}]},
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "a", "type": None, "function": {"name": "f", "arguments": None}}],
                    },
                ],
                "tool_choice": {"type": None, "function": {"name": "f"}},
                "stream_options": {"include_usage": None},
                "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "name": None, "strict": None}},
            },
        ),
        (ResponsesRequest, {"input": "Hi", "text": {"format": None}, "store": None, "reasoning": {"effort": None}}),
        (ResponsesRequest, {"input": [{"type": "reasoning", "summary": None, "content": None}]}),
        (
            MessagesRequest,
            {
                "messages": [
                    {"role": "user", "content": "Hi"},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "thinking", "thinking": "Hm", "signature": None},
                            {"type": "tool_use", "id": "a", "name": "f", "input": {"x": None}},
                        ],
                    },
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": None}]},
                ],
                "tool_choice": {"type": "auto", "disable_parallel_tool_use": None},
                "max_tokens": 5,
            },
        ),
    ],
)
def test_null_omits_a_field_at_any_depth(model: type[BaseModel], content: Any):
    model.model_validate(content)


def test_null_within_data_is_data():
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {"x": None}}
    request = MessagesRequest.model_validate({"messages": [{"role": "assistant", "content": [call]}], "max_tokens": 5})
    assert request.messages[0].content[0].root.input == {"x": None}  # type: ignore[union-attr]
    schema = {"enum": ["a", None], "default": None}
    request = MessagesRequest.model_validate(
        {
            "messages": [],
            "max_tokens": 5,
            "tools": [{"name": "f", "input_schema": schema}],
            "output_config": None,
        }
    )
    assert request.tools is not None
    assert request.tools[0].root.input_schema == schema  # type: ignore[union-attr]
