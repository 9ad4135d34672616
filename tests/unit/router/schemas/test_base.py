"""Every number that a client may give has bounds, and they fit the messages to the shards."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.compatibility import VertexRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import CompatGenerateRequest, GenerateRequest

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
