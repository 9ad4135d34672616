"""Calls of a server over HTTP."""

import json
from typing import Any

import httpx

from tests.servers import TextGenerationServer

_SECONDS = 300


def send(server: TextGenerationServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=_SECONDS)


def post(server: TextGenerationServer, path: str, body: dict[str, Any]) -> Any:
    """Returns the response's JSON. Raises HTTPStatusError with its status unless the request succeeds."""
    response = send(server, path, body)
    assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
    return response.json()


def streamed_lines(server: TextGenerationServer, path: str, body: dict[str, Any]) -> list[str]:
    """Returns the lines of a stream that are not empty, and no comments, which a stream has while it waits for long."""
    response = send(server, path, body)
    assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
    return [line for line in response.text.split("\n") if line and not line.startswith(":")]


def generated_tokens(server: TextGenerationServer, prompt: str, tokens: int) -> tuple[list[dict[str, Any]], str, str]:
    """Returns the tokens of a greedy answer, the texts of its stream's events joined, and why it ended."""
    body = {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "details": True}}
    events = [json.loads(line.partition(":")[2]) for line in streamed_lines(server, "/generate_stream", body)]
    found = [event["token"] for event in events]
    text = events[-1]["generated_text"]
    assert "".join(token["text"] for token in found if not token["special"]) == text
    return found, text, events[-1]["details"]["finish_reason"]
