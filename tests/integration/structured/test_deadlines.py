"""A text that its deadline ends early is whole and valid all the same."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest

from tests.servers import TextGenerationServer

SCHEMA = {
    "type": "object",
    "properties": {
        "lines": {"type": "array", "items": {"type": "string"}, "minItems": 8},
        "size": {"type": "object", "properties": {"width": {"type": "number"}}, "required": ["width"]},
    },
    "required": ["lines", "size"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "lines", "schema": SCHEMA}}
# Random tokens, so that strings are long.
CHAT = {
    "messages": [{"role": "user", "content": "Lines"}],
    "response_format": FORM,
    "temperature": 50.0,
    "seed": 1,
    "max_tokens": 1800,
}


def until_the_deadline_ends_it(
    server: TextGenerationServer, path: str, body: dict[str, Any], is_whole: Callable[[str], bool] = bool
) -> httpx.Response:
    """Returns the answer of a request that ended early. Gives it more time where the machine stood still."""
    for milliseconds in (250, 500, 1000, 2000, 4000):
        if "parameters" in body:
            body["parameters"]["timeout_ms"] = milliseconds
        else:
            body["timeout_ms"] = milliseconds
        response = httpx.post(server.url + path, json=body, timeout=60)
        if response.headers.get("x-finish-reason") == "deadline" and is_whole(response.text):
            return response
        assert response.status_code in (200, 504), response.text
    pytest.fail(f"the deadline never ended the text: {response.headers}")


def test_json_is_whole_and_valid(demo_server: TextGenerationServer) -> None:
    body = CHAT | {"on_timeout": "complete"}
    response = until_the_deadline_ends_it(demo_server, "/v1/chat/completions", body, lambda text: '}}"' in text)
    (choice,) = response.json()["choices"]
    assert choice["finish_reason"] == "length"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_a_partial_text_ends_as_it_is(demo_server: TextGenerationServer) -> None:
    parameters = {"max_new_tokens": 1800, "ignore_eos": True, "on_timeout": "partial", "details": True}
    response = until_the_deadline_ends_it(demo_server, "/generate", {"inputs": "Rice", "parameters": parameters})
    answer = response.json()
    assert answer["details"]["finish_reason"] == "deadline"
    assert 0 < answer["details"]["generated_tokens"] < 1800
    assert answer["generated_text"]


def test_another_action_is_refused(demo_server: TextGenerationServer) -> None:
    response = httpx.post(f"{demo_server.url}/v1/chat/completions", json=CHAT | {"on_timeout": "hurry"}, timeout=60)
    assert response.status_code == 400
    assert "`on_timeout` is 'hurry'; it must be fail, partial, complete" in response.text
