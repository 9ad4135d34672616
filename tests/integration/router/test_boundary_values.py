"""Boundary values of every numeric field on every route, beside streams that must not notice them."""

import asyncio
import json
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from tests.integration.router.conftest import Router
from tests.servers import TextGenerationServer
from tgi_server.router.schemas.chat import ChatRequest
from tgi_server.router.schemas.completions import CompletionRequest
from tgi_server.router.schemas.generate import GenerateParameters
from tgi_server.router.schemas.ollama import OllamaOptions

INTEGERS = (1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 2**64, -1, -(2**31), -(2**31) - 1, -(2**63) - 1)
# JSON as text, so that there may be numbers in it that Python does not write.
VALUES = [
    *("0", "-0.0", "0.5", "1e-60", "5e-324", "-1e-9", "3.5e38", "1e308", "1e400", "-1e400", "NaN", "Infinity", "null"),
    *map(str, INTEGERS),
    *("1" + "0" * digits for digits in (300, 400, 5000)),
]
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/generate": (GenerateParameters, {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}),
    "/generate_stream": (GenerateParameters, {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hello", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
    "/api/generate": (OllamaOptions, {"prompt": "Hello", "options": {"num_predict": 2}}),
}
# The object of a body that has the options.
OBJECTS = ("parameters", "options")


def _is_numeric(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return any(map(_is_numeric, typing.get_args(annotation)[:2]))
    return annotation in (int, float)


def _bodies(route: str) -> Iterator[tuple[str, str]]:
    """Yields a name and a JSON text for each numeric field of a route, and for logit biases, with each value."""
    model, body = ROUTES[route]
    fields = {name: "@" for name, field in model.model_fields.items() if _is_numeric(field.annotation)}
    assert {"temperature", "top_k", "seed"} <= fields.keys()
    for name, hole in [*fields.items(), ("logit_bias", {"5": "@"})]:
        filled = _with_options(body, {name: hole})
        if name == "top_logprobs":
            filled["logprobs"] = True
        for value in VALUES:
            yield f"{name} of {value[:30]}", json.dumps(filled).replace('"@"', value)
    token_ids = {f'{{"{value}": 1}}': value for value in VALUES}
    for bias, value in token_ids.items():
        filled = _with_options(body, {"logit_bias": "@"})
        yield f"logit_bias of token {value[:30]}", json.dumps(filled).replace('"@"', bias)


def _with_options(body: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Returns a body with further options."""
    where = next((name for name in OBJECTS if name in body), None)
    return {**body, **options} if where is None else {**body, where: {**body[where], **options}}


async def _stream(client: httpx.AsyncClient, seed: int, tokens: int) -> str:
    body = {
        "inputs": f"Story {seed}:",
        "parameters": {"max_new_tokens": tokens, "do_sample": True, "seed": seed, "ignore_eos": True},
    }
    text = []
    async with client.stream("POST", "/generate_stream", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                text.append(json.loads(line.removeprefix("data:"))["token"]["text"])
    return "".join(text)


async def _hostile(client: httpx.AsyncClient, route: str) -> int:
    """Sends them all, eight at a time. Returns how many were accepted."""
    accepted = 0
    left = _bodies(route)

    async def send() -> None:
        nonlocal accepted
        for name, body in left:
            response = await client.post(route, content=body, headers={"content-type": "application/json"})
            allowed = (200, 400, 422, 503, 504) if name.startswith("timeout_ms") else (200, 400, 422)
            assert response.status_code in allowed, f"{route}, {name}: {response.status_code} {response.text}"
            assert len(response.content) < 4000, f"{route}, {name}: an error of {len(response.content)} bytes"
            accepted += response.status_code == 200

    await asyncio.gather(*(send() for _ in range(8)))
    return accepted


async def _check(client: httpx.AsyncClient, routes: Iterable[str], tokens: int) -> None:
    alone = [await _stream(client, seed, tokens) for seed in range(4)]
    running = asyncio.Event()

    async def streams() -> None:
        while not running.is_set():
            assert await asyncio.gather(*(_stream(client, seed, tokens) for seed in range(4))) == alone

    beside = asyncio.create_task(streams())
    for route in routes:
        assert await _hostile(client, route) > 50
    running.set()
    await beside


@pytest.mark.parametrize(
    "route", ["/generate", *(pytest.param(route, marks=pytest.mark.slow) for route in ROUTES if route != "/generate")]
)
async def test_boundary_values_harm_nobody(router: Router, caplog: pytest.LogCaptureFixture, route: str) -> None:
    await _check(router.http, [route], tokens=200)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.slow
async def test_boundary_values_harm_no_seeded_stream_of_a_model(demo_server: TextGenerationServer) -> None:
    async with httpx.AsyncClient(base_url=demo_server.url, timeout=60) as client:
        await _check(client, ROUTES, tokens=200)
