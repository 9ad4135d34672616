"""Answers that are generated before they are requested: a real model, and unmodified clients."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from huggingface_hub import InferenceClient
from openai import OpenAI

from tests.integration.router.conftest import Router, RouterFactory
from tests.servers import TextGenerationServer
from tests.timing import until

ASKED = "How do I cook rice? Rinse it, and let it stand in cold water for ten minutes. What is next, please?"
CHAT: dict[str, Any] = {"model": "tgi", "messages": [{"role": "user", "content": ASKED}], "max_tokens": 48}
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "frequency_penalty": 0.4}
FORM = {
    "type": "object",
    "properties": {"dish": {"type": "string", "maxLength": 20}, "minutes": {"type": "integer", "maximum": 90}},
    "required": ["dish", "minutes"],
}
JSON: dict[str, Any] = {
    **GREEDY,
    "response_format": {"type": "json_schema", "json_schema": {"name": "dish", "schema": FORM}},
}


def used(server: TextGenerationServer) -> float:
    return metric(server, "tgi_early_answer_used_tokens_total")


def metric(server: TextGenerationServer, name: str) -> float:
    (found,) = re.findall(rf"^{name} (\S+)", httpx.get(f"{server.url}/metrics").text, re.MULTILINE)
    return float(found)


def post(server: TextGenerationServer, path: str, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    content: dict[str, Any] = response.json()
    return content


def salted(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the body with a salt of its own, so that it shares nothing with other tests."""
    return body | {"cache_salt": uuid4().hex}


def told(chunks: list[Any]) -> list[Any]:
    """Returns the texts of a chat's chunks, with the exact log-probabilities."""
    return [
        (chunk.choices[0].delta.content, [entry.to_dict() for entry in chunk.choices[0].logprobs.content])
        for chunk in chunks
    ]


@pytest.mark.parametrize("options", [GREEDY, SEEDED, JSON], ids=["greedy", "seeded", "JSON"])
@pytest.mark.parametrize("tokens", [12, 48])
def test_tokens_and_logprobs_are_the_same_bits(
    demo_server: TextGenerationServer, options: dict[str, Any], tokens: int
) -> None:
    chat: Any = OpenAI(base_url=f"{demo_server.url}/v1", api_key="none", max_retries=0).chat.completions
    body = CHAT | options | {"logprobs": True, "top_logprobs": 3}
    expected = told(list(chat.create(**body, stream=True, extra_body={"cache_salt": uuid4().hex})))
    again = salted(body)
    before = used(demo_server)
    warm = post(demo_server, "/v1/warm", **again, answer_tokens=tokens)
    assert 0 < warm["answer_tokens"] <= tokens + 8
    assert used(demo_server) == before
    salt = {"cache_salt": again["cache_salt"]}
    assert told(list(chat.create(**body, stream=True, extra_body=salt))) == expected
    assert used(demo_server) == before + warm["answer_tokens"]
    whole = chat.create(**body, extra_body=salt)
    assert whole.choices[0].message.content == "".join(text for text, _ in expected)
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0
    assert used(demo_server) == before + 2 * warm["answer_tokens"]


@pytest.mark.parametrize("parameters", [{}, {"do_sample": True, "seed": 3, "temperature": 0.8}])
def test_tgi_requests_get_them(demo_server: TextGenerationServer, parameters: dict[str, Any]) -> None:
    client, before = InferenceClient(demo_server.url), used(demo_server)
    asked: dict[str, Any] = parameters | {"max_new_tokens": 30}
    prompt = f"### Instruction:\nHow do I cook rice for {2 + len(parameters)}?\n\n### Response:\n"
    expected = post(demo_server, "/generate", inputs=prompt, parameters=asked | {"details": True, "cache_salt": "a"})
    warm = post(demo_server, "/v1/warm", inputs=prompt, parameters=asked, answer_tokens=10)
    assert warm["answer_tokens"] == 10
    tokens = list(client.text_generation(prompt, stream=True, details=True, **asked))
    found = [(each.token.id, each.token.logprob) for each in tokens]
    assert found == [(each["id"], each["logprob"]) for each in expected["details"]["tokens"]]
    assert client.text_generation(prompt, **asked) == expected["generated_text"]
    assert used(demo_server) == before + 20


def test_completions_get_them_and_others_do_not(demo_server: TextGenerationServer) -> None:
    body = salted({"prompt": ASKED, "max_tokens": 20, "stop": ["zzz"], **GREEDY})
    before = used(demo_server)
    post(demo_server, "/v1/warm", **body, answer_tokens=8)
    for changes in (
        {"prompt": ASKED + " Tell me."},
        {"cache_salt": "somebody else"},
        {"max_tokens": 19},
        {"temperature": 0.5, "seed": 1},
        {"logprobs": 2},
        {"guided_regex": "[a-z ]{8,}"},
    ):
        post(demo_server, "/v1/completions", **body | changes)
    assert used(demo_server) == before
    post(demo_server, "/v1/completions", **body)
    assert used(demo_server) == before + 8


def test_a_request_takes_over_what_is_being_generated(demo_server: TextGenerationServer) -> None:
    body = salted(CHAT | GREEDY | {"max_tokens": 400, "ignore_eos": True})
    expected = post(demo_server, "/v1/chat/completions", **body | {"cache_salt": "other"})["choices"][0]["message"]
    before, generated = used(demo_server), "tgi_early_answer_generated_tokens_total"
    begun, warm = metric(demo_server, generated), {}

    def foresee() -> None:
        warm.update(post(demo_server, "/v1/warm", **body, answer_tokens=400))

    thread = threading.Thread(target=foresee)
    thread.start()
    until(lambda: metric(demo_server, generated) > begun + 3)
    found = post(demo_server, "/v1/chat/completions", **body)["choices"][0]["message"]
    thread.join(30)
    assert found == expected
    assert 3 < warm["answer_tokens"] < 400
    assert used(demo_server) == before + warm["answer_tokens"]


async def test_a_client_that_leaves_stops_it(routers: RouterFactory) -> None:
    router: Router = await routers(shard={"step_seconds": 0.005})
    router.say("word " * 300, end=False)
    body = {"prompt": ASKED, "max_tokens": 250, **GREEDY}
    await router.leave("/v1/warm", **body, answer_tokens=250)
    await router.idle()
    generated = await router.metric("tgi_early_answer_generated_tokens_total")
    assert generated < 250
    assert (await router.post("/v1/completions", **body)).status_code == 200
    assert await router.metric("tgi_early_answer_used_tokens_total") == generated


async def test_another_prompt_with_the_same_key_throws_it_away(routers: RouterFactory) -> None:
    router: Router = await routers(shard={"step_seconds": 0.005})
    router.say("word " * 300, end=False)
    body = {"prompt": ASKED, "max_tokens": 250, "prompt_cache_key": "turn", **GREEDY}
    first = asyncio.create_task(router.post("/v1/warm", **body, answer_tokens=250))

    async def begun() -> bool:
        return await router.metric("tgi_early_answer_generated_tokens_total") > 3

    await router.until(begun)
    other = await router.post("/v1/warm", **body | {"prompt": ASKED + " And"}, answer_tokens=5)
    assert other.json()["answer_tokens"] == 5
    given_up = (await first).json()
    assert 3 < given_up["answer_tokens"] < 250
    assert (await router.post("/v1/completions", **body)).status_code == 200
    assert await router.metric("tgi_early_answer_used_tokens_total") == 0


async def test_keys_share_no_answers(routers: RouterFactory, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    router: Router = await routers(api_key_file=keys)
    body = {"prompt": ASKED, "max_tokens": 5, **GREEDY}

    async def ask(path: str, key: str, **more: Any) -> float:
        headers = {"authorization": f"Bearer {key}"}
        assert (await router.http.post(path, json=body | more, headers=headers)).status_code == 200
        return await router.metric("tgi_early_answer_used_tokens_total")

    await ask("/v1/warm", "first-key", answer_tokens=4)
    assert await ask("/v1/completions", "second-key") == 0
    assert await ask("/v1/completions", "first-key") == 4


async def test_a_deadline_ends_it(routers: RouterFactory) -> None:
    router: Router = await routers(shard={"step_seconds": 0.01})
    router.say("word " * 300, end=False)
    body = {"prompt": ASKED, "max_tokens": 250, **GREEDY}
    response = await router.post("/v1/warm", **body, answer_tokens=250, timeout_ms=300)
    assert (response.status_code, response.headers["x-error-code"]) == (504, "deadline_exceeded")
    generated = await router.metric("tgi_early_answer_generated_tokens_total")
    assert (await router.post("/v1/completions", **body)).status_code == 200
    assert await router.metric("tgi_early_answer_used_tokens_total") == generated


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"prompt": ASKED}, "seed"),
        ({"prompt": ASKED, "temperature": 0.5, "seed": -1}, "seed"),
        ({"inputs": ASKED, "parameters": {"do_sample": True}}, "without sampling"),
        ({"inputs": ASKED}, "without sampling"),
        ({"messages": CHAT["messages"], "temperature": 0.7}, "temperature"),
        ({"prompt": ASKED, "temperature": 0, "n": 2}, "`n`"),
        ({"prompt": ASKED, "temperature": 0, "echo": True, "logprobs": 1}, "log-probabilities of the prompt"),
        ({"inputs": ASKED, "parameters": {"decoder_input_details": True}}, "log-probabilities of the prompt"),
        ({"prompt": ASKED, "temperature": 0, "answer_tokens": 513}, "512"),
        ({"prompt": ASKED, "temperature": 0, "answer_tokens": -1}, "0"),
    ],
)
async def test_what_may_differ_later_is_refused(router: Router, body: dict[str, Any], names: str) -> None:
    response = await router.post("/v1/warm", **{"answer_tokens": 4} | body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "answer_tokens", response.text
    assert names in response.json()["error"]["message"]
    assert (await router.post("/v1/warm", **body | {"answer_tokens": 0})).status_code == 200


async def test_without_a_prefix_cache_it_is_refused(routers: RouterFactory) -> None:
    router: Router = await routers(prefix_caching=False)
    response = await router.post("/v1/warm", prompt=ASKED, temperature=0, answer_tokens=4)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "answer_tokens")
    assert "prefix cache" in json.dumps(response.json())
