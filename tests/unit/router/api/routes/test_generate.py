"""/generate and /generate_stream over a scheduler that answers at once."""

import json
from typing import Any

import httpx

from tests.fakes.router_service import LOGPROB, ScriptedScheduler
from tests.fakes.vocabularies import EOS
from tgi_server.router.errors import GenerationFailed


async def generate(client: httpx.AsyncClient, inputs: str = "hello", **parameters: Any) -> Any:
    response = await client.post("/generate", json={"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    return response.json()


async def events(client: httpx.AsyncClient, **parameters: Any) -> list[dict[str, Any]]:
    response = await client.post("/generate_stream", json={"inputs": "hello", "parameters": parameters})
    assert response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(line.removeprefix("data:")) for line in response.text.split("\n\n") if line]


async def test_events_are_in_tgis_form(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    assert (await client.post("/generate_stream", json={"inputs": "hello"})).text.startswith('data:{"')
    scheduler.error = GenerationFailed("the shards failed")
    failed = await client.post("/generate_stream", json={"inputs": "hello"}, headers={"accept": "text/event-stream"})
    assert failed.text.startswith('data:{"')


async def test_parameters_reach_the_scheduler_as_they_were_meant(
    client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    parameters = {"max_new_tokens": 7, "temperature": 0.5, "top_k": 3, "seed": 11, "ignore_eos": True}
    await generate(client, **parameters)
    (request,) = scheduler.submitted
    assert (request.options.stopping.max_new_tokens, request.options.stopping.ignore_eos) == (7, True)
    assert (request.options.sampling.temperature, request.options.sampling.top_k, request.options.sampling.seed) == (
        0.5,
        3,
        11,
    )
    assert not request.options.report.logprobs


async def test_details_tell_each_token(client: httpx.AsyncClient):
    details = (await generate(client, details=True))["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", 3, None)
    assert [(each["text"], each["special"]) for each in details["tokens"]] == [
        ("hello", False),
        (" world", False),
        (EOS, True),
    ]
    assert {each["logprob"] for each in details["tokens"]} == {LOGPROB}


async def test_a_token_that_ends_the_text_is_told_as_special(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    """Models may end a text with a token that their tokenizer does not call special."""
    scheduler.texts, scheduler.end = ["hello"], " world"
    answer = await generate(client, details=True)
    assert answer["generated_text"] == "hello"
    told = [("hello", False), (" world", True)]
    assert [(each["text"], each["special"]) for each in answer["details"]["tokens"]] == told
    assert [(each["token"]["text"], each["token"]["special"]) for each in await events(client)] == told


async def test_the_last_token_ends_with_the_stop_sequence(client: httpx.AsyncClient):
    details = (await generate(client, details=True, stop=["or"]))["details"]
    assert [each["text"] for each in details["tokens"]] == ["hello", " wor"]
    assert [each["token"]["text"] for each in await events(client, stop=["or"])] == ["hello", " wor"]


async def test_the_best_of_several_texts_comes_first(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    scheduler.texts = ["hello", "hello world"]
    answer = await generate(client, best_of=2, do_sample=True, details=True)
    texts = {answer["generated_text"], answer["details"]["best_of_sequences"][0]["generated_text"]}
    assert texts == {"hello", "hello world"}
    assert len({request.options.sampling.seed for request in scheduler.submitted}) == 2


async def test_the_last_event_has_the_whole_text(client: httpx.AsyncClient):
    told = await events(client, return_full_text=True, details=True)
    assert [each["token"]["text"] for each in told] == ["hello", " world", EOS]
    assert [each["generated_text"] for each in told] == [None, None, "hellohello world"]
    assert told[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": 3,
        "seed": None,
        "input_length": 1,
    }


async def test_a_stop_sequence_ends_the_text_and_is_part_of_it(client: httpx.AsyncClient):
    told = await events(client, stop=["wor"], details=True)
    assert told[-1]["generated_text"] == "hello wor"
    assert told[-1]["details"]["finish_reason"] == "stop_sequence"
