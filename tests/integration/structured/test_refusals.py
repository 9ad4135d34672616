"""Grammars that cannot be compiled or explode: a 422 that says why, and no other request is affected."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.integration.structured.test_generate import GRAMMARS, PROMPT, generate, post, stream
from tests.servers import TextGenerationServer

EXPLOSIVE = {"type": "lark", "value": 'start: text\ntext: text text text | text text | "" | /[a-z]/'}
NESTED: dict[str, Any] = {"type": "string"}
for _ in range(150):
    NESTED = {"type": "array", "items": NESTED}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no regular expression": ({"type": "regex", "value": "[a"}, "regular expression"),
    "look-ahead": ({"type": "regex", "value": "(?=a)b"}, "look-ahead"),
    "what cannot be asked for": (
        {"type": "json", "value": {"oneOf": [{"type": "integer"}, {"type": "number"}]}},
        "'oneOf'",
    ),
    "a keyword far inside": (
        {"type": "json", "value": {"properties": {"a": {"items": {"type": "x"}}}}},
        "properties/a",
    ),
    "a schema without values": ({"type": "json", "value": False}, "nothing matches"),
    "contradictions": ({"type": "json", "value": {"type": "integer", "minimum": 5, "maximum": 2}}, "cannot be used"),
    "nested too deep": ({"type": "json", "value": NESTED}, "deep"),
    "no schema": ({"type": "json", "value": "[1"}, "not JSON"),
    "no rule": ({"type": "lark", "value": "start: nowhere"}, "nowhere"),
    "too large": ({"type": "json", "value": {"enum": ["x" * 1000 + str(i) for i in range(1100)]}}, "at most"),
    "an unknown type": ({"type": "xml", "value": "a"}, "type"),
}


@pytest.mark.parametrize(
    ("name", "route"),
    [
        pytest.param(name, route, marks=() if route == "/generate" or name == "look-ahead" else pytest.mark.slow)
        for name in REFUSED
        for route in ("/generate", "/generate_stream", "/")
    ],
)
def test_what_cannot_be_compiled_is_refused(demo_server: TextGenerationServer, name: str, route: str) -> None:
    grammar, told = REFUSED[name]
    body = {"inputs": PROMPT, "parameters": {"grammar": grammar, "max_new_tokens": 20}}
    response = post(demo_server, route, body)
    assert response.status_code == 422
    answer = response.json()
    assert told in answer["error"], answer
    assert answer["error_type"] == "validation"
    assert "\n" not in answer["error"]


@pytest.mark.slow
def test_what_explodes_later_ends_alone(demo_server: TextGenerationServer) -> None:
    parameters = {"grammar": EXPLOSIVE, "max_new_tokens": 500, "ignore_eos": True}
    body = {"inputs": PROMPT, "parameters": parameters}
    with ThreadPoolExecutor(3) as pool:
        exploding = pool.submit(post, demo_server, "/generate", body)
        neighbour = pool.submit(generate, demo_server, grammar=GRAMMARS["json"][0])
        streamed = pool.submit(stream, demo_server, PROMPT, **parameters)
    assert exploding.result().status_code == 422
    assert "could not be followed" in exploding.result().json()["error"]
    assert "could not be followed" in json.dumps(streamed.result()[-1])
    assert GRAMMARS["json"][1](neighbour.result()["generated_text"])
    # On a busy machine the grammar may not be compiled in time at first, which is a 429.
    client = OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=3)
    options: Any = {"response_format": EXPLOSIVE, "extra_body": {"ignore_eos": True}, "max_tokens": 500}
    messages: Any = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.BadRequestError, match="could not be followed"):
        client.chat.completions.create(model="tgi", messages=messages, **options)
