"""Other services' routes take the requests of TGI's and OpenAI's routes."""

from typing import Any

import httpx
import pytest

from tests.fakes.router_service import ScriptedScheduler

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def test_the_root_answers_with_a_list_or_streams(client: httpx.AsyncClient):
    assert (await client.post("/", json={"inputs": "hello"})).json() == [{"generated_text": "hello world"}]
    streamed = await client.post("/", json={"inputs": "hello", "stream": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"inputs": "hello"}, list),
        (CHAT, "chat.completion"),
        ({"model": "m", "prompt": "hello"}, "text_completion"),
    ],
)
async def test_sagemaker_requests_are_told_apart_by_their_members(
    client: httpx.AsyncClient, body: dict[str, Any], kind: Any
):
    answer = (await client.post("/invocations", json=body)).json()
    assert isinstance(answer, list) if kind is list else answer["object"] == kind


@pytest.mark.parametrize(
    ("body", "told"),
    [
        *((body, "the request needs `inputs`, `messages` or `prompt`") for body in ({}, {"input": "hello"})),
        *((body, "the request must be an object") for body in ([], "inputs")),
    ],
)
async def test_a_sagemaker_request_without_such_a_member_is_refused(client: httpx.AsyncClient, body: Any, told: str):
    response = await client.post("/invocations", json=body)
    assert response.status_code == 422
    assert told in response.json()["error"]


async def test_vertex_predicts_for_each_instance(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    scheduler.texts = ["a", "b"]
    instances = [{"inputs": "hello", "parameters": {"max_new_tokens": 9}}, CHAT]
    answer = (await client.post("/vertex", json={"instances": instances})).json()
    assert answer == {"predictions": ["a", "b"]}
    assert scheduler.submitted[0].options.stopping.max_new_tokens == 9


async def test_vertex_refuses_a_request_whose_second_instance_is_wrong(
    client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    faults = {
        "`instances[1].inputs` must not be empty": {"inputs": ""},
        "`instances[1].parameters.best_of` is 9;": {"inputs": "a", "parameters": {"best_of": 9}},
        "`instances[1].n` is 9;": CHAT | {"n": 9},
        "`instances[1]`: `inputs` must have less than 301 tokens": {"inputs": "a" * 400},
        "`instances[1]`: a prediction is one text": CHAT | {"n": 2},
    }
    for fault, instance in faults.items():
        response = await client.post("/vertex", json={"instances": [{"inputs": "hello"}, instance]})
        assert response.status_code == 422
        assert fault in response.json()["error"]
    assert not scheduler.submitted
