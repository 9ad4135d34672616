"""/v1/responses, as OpenAI's client knows it."""

import asyncio
import json
from contextlib import suppress
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.integration.router.conftest import Router, RouterFactory, in_one_loop
from tests.integration.router.test_openai_client import TEXT, client

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = '{"name": "get_weather", "arguments": {"place": "Paris"}}'


async def create(router: Router, **options: Any) -> Any:
    return await client(router).responses.create(**{"model": "tgi", "input": "Hello", **options})


async def prompt(router: Router) -> str:
    """The prompt that reached the shards last."""
    ids = list(router.shard.received[-1].input_ids)
    return str((await router.post("/detokenize", tokens=ids)).json()["prompt"])


async def test_a_response(router: Router):
    length = router.say(TEXT)
    response = await create(router, instructions="Be brief.", metadata={"a": "b"}, temperature=0)
    assert (response.output_text, response.status, response.model) == (TEXT, "completed", "instant")
    assert (response.usage.output_tokens, response.metadata) == (length, {"a": "b"})
    assert response.usage.total_tokens == response.usage.input_tokens + length
    assert await prompt(router) == "<|bos|><|system|>Be brief.<|user|>Hello<|assistant|>"
    assert not router.shard.received[-1].sampling.do_sample


async def test_a_stream(router: Router):
    router.say("日本 🍕!")
    events = [event async for event in await create(router, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type for event in events]
    assert types[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert types[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "日本 🍕!"
    assert events[-1].response.output_text == "日本 🍕!"
    async with client(router).responses.stream(model="tgi", input="Hello") as stream:
        assert (await stream.get_final_response()).output_text == "日本 🍕!"
    await router.idle()


async def test_parameters_of_chats(router: Router):
    more = {"seed": 7, "top_k": 3, "presence_penalty": 0.5, "logit_bias": {"5": 1}, "stop": ["rice"]}
    response = await create(router, extra_body=more)
    assert response.output_text == "Rinse the "
    sampling = router.shard.received[-1].sampling
    assert (sampling.seed, sampling.top_k, sampling.presence_penalty, dict(sampling.logit_bias)) == (7, 3, 0.5, {5: 1})
    assert "seed" not in response.model_dump()


async def test_an_answer_that_is_cut_off(router: Router):
    response = await create(router, max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    last = [event async for event in await create(router, max_output_tokens=2, stream=True)][-1]
    assert last.type == "response.incomplete"


async def test_calls_of_tools(router: Router):
    router.say(CALL + CALL.replace("Paris", "Rome"))
    response = await create(router, tools=[WEATHER], tool_choice={"type": "function", "name": "get_weather"})
    first, second = response.output
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "get_weather", {"place": "Paris"})
    assert json.loads(second.arguments) == {"place": "Rome"}
    events = [event async for event in await create(router, tools=[WEATHER], stream=True)]
    for index, place in enumerate(("Paris", "Rome")):
        deltas = [
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta" and event.output_index == index
        ]
        assert json.loads("".join(deltas)) == {"place": place}
    router.say(TEXT)
    results: Any = [{"type": "function_call_output", "call_id": first.call_id, "output": "sunny"}]
    after = await create(router, previous_response_id=response.id, input=results)
    assert after.output_text == TEXT
    told = await prompt(router)
    assert CALL in told
    assert "<|tool|>sunny" in told
    conversation: Any = [{"role": "user", "content": "Hello"}, first, second, *results]
    assert (await create(router, input=conversation)).output_text == TEXT
    assert await prompt(router) == told


async def test_a_call_that_a_stop_sequence_cuts_off_is_incomplete(router: Router):
    router.say(CALL)
    cut: Any = {"tools": [WEATHER], "extra_body": {"stop": ["aris"]}}
    response = await create(router, **cut)
    assert (response.status, response.incomplete_details) == ("incomplete", None)
    assert (response.output[0].status, response.output[0].arguments) == ("incomplete", '{"place": "P')
    last = [event async for event in await create(router, **cut, stream=True)][-1]
    assert (last.type, last.response.output[0].status) == ("response.incomplete", "incomplete")
    response = await create(router, tools=[WEATHER], extra_body={"stop": ["xyz"]})
    assert (response.status, response.output[0].status) == ("completed", "completed")


async def test_a_form_of_the_answer(router: Router):
    class Rice(BaseModel):
        minutes: int

    router.say('{"minutes": 12}')
    response = await client(router).responses.parse(model="tgi", input="Hello", text_format=Rice)
    assert response.output_parsed == Rice(minutes=12)
    grammar = json.loads(router.shard.received[-1].grammar.value)
    assert grammar["properties"]["minutes"]["type"] == "integer"


async def test_thoughts_are_items_of_their_own(routers: RouterFactory):
    router = await routers(reasoning_parser="qwen3")
    router.say(f"<think>Hm.</think>\n{TEXT}")
    response = await create(router, reasoning={"effort": "low"})
    thoughts, _ = response.output
    assert (thoughts.type, thoughts.content[0].text, response.output_text) == ("reasoning", "Hm.", TEXT)
    assert response.usage.output_tokens_details.reasoning_tokens > 0


async def test_logprobs(router: Router):
    length = router.say("é!")
    response = await create(router, include=["message.output_text.logprobs"], top_logprobs=2)
    logprobs = response.output[0].content[0].logprobs
    assert [len(entry.top_logprobs) for entry in logprobs] == [2] * length


async def test_a_conversation_goes_on(routers: RouterFactory):
    router = await routers(max_stored_responses=2)
    first = await create(router, instructions="Be brief.", input=[{"role": "user", "content": "Hello"}])
    second = await create(router, previous_response_id=first.id, input="And then?")
    assert await prompt(router) == f"<|bos|><|user|>Hello<|assistant|>{TEXT}<|eos|><|user|>And then?<|assistant|>"
    assert second.previous_response_id == first.id
    assert (await client(router).responses.retrieve(first.id)).output_text == TEXT
    await client(router).responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await client(router).responses.retrieve(first.id)
    unkept = await create(router, store=False)
    for gone in (first.id, unkept.id):
        with pytest.raises(openai.BadRequestError) as error:
            await create(router, previous_response_id=gone)
        assert error.value.code == "previous_response_not_found"
    await create(router)
    await create(router)
    with pytest.raises(openai.NotFoundError, match="evicted"):
        await client(router).responses.retrieve(second.id)


async def test_what_is_kept_is_the_clients_own(routers: RouterFactory, tmp_path: Any):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    router = await routers(api_key_file=keys)
    response = await client(router, "one").responses.create(model="tgi", input="Hello")
    assert (await client(router, "one").responses.retrieve(response.id)).id == response.id
    with pytest.raises(openai.NotFoundError):
        await client(router, "two").responses.retrieve(response.id)
    for method in ("GET", "DELETE"):
        assert (await router.http.request(method, f"/v1/responses/{response.id}")).status_code == 401


async def test_no_key_makes_the_server_forget_what_others_store(routers: RouterFactory, tmp_path: Any):
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    router = await routers(api_key_file=keys, max_stored_responses=4)
    first = await client(router, "one").responses.create(model="tgi", input="Hello")
    others = [await client(router, "two").responses.create(model="tgi", input="Hello") for _ in range(8)]
    assert (await client(router, "one").responses.retrieve(first.id)).id == first.id
    with pytest.raises(openai.NotFoundError):
        await client(router, "two").responses.retrieve(others[0].id)
    for response in others[-3:]:
        assert (await client(router, "two").responses.retrieve(response.id)).id == response.id


async def test_a_conversation_is_no_longer_than_a_body(routers: RouterFactory):
    router = await routers(payload_limit=20_000)
    more: Any = {"input": "rice " * 1_000, "extra_body": {"truncate_prompt_tokens": 10}}

    async def converse(turns: int) -> None:
        response = await create(router, **more)
        for _ in range(turns):
            response = await create(router, previous_response_id=response.id, **more)

    await converse(2)
    with pytest.raises(openai.APIStatusError) as refused:
        await converse(4)
    assert refused.value.status_code == 413
    assert "conversation" in refused.value.message
    assert (await create(router, input="Hello")).output_text


async def test_a_stored_response_is_what_was_sent_and_takes_no_place(routers: RouterFactory):
    router = await routers(max_concurrent_requests=1, shard={"step_seconds": 0.2})
    sent = await router.post("/v1/responses", input="Hello", max_output_tokens=1, metadata={"a": "日本"})
    path = f"/v1/responses/{sent.json()['id']}"
    stored = await router.http.get(path)
    assert (stored.content, stored.headers["content-type"]) == (sent.content, "application/json")
    endless = {"max_new_tokens": 2_000, "ignore_eos": True}
    asking = asyncio.create_task(router.post("/generate", inputs="Hello", parameters=endless))
    await router.until(lambda: router.service.capacity.in_flight == 1)
    assert (await router.http.get(path)).content == sent.content
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    await router.until(lambda: router.service.capacity.in_flight == 0)


async def test_a_stream_may_repeat_a_long_request(router: Router):
    metadata = {"a": "日本 \u2028" * 150_000}
    events = [event async for event in await create(router, metadata=metadata, stream=True)]
    assert events[-1].type == "response.completed"
    assert events[0].response.metadata == events[-1].response.metadata == metadata


@in_one_loop
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "images"),
        ({"input": []}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"tool_choice": "required"}, "tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "schema"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"n": 2}, "`n`"),
    ],
)
async def test_what_is_refused(shared_router: Router, body: dict[str, Any], told: str):
    response = await shared_router.post("/v1/responses", **{"input": "Hello", **body})
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]


async def test_errors(router: Router):
    response = await router.post("/v1/responses", input="Hello " * 10**4)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    router.shard.fail = "out of memory"
    with pytest.raises(openai.APIError, match="out of memory"):
        async for _ in await create(router, stream=True):
            pass


async def test_embeddings_are_refused_by_name(router: Router):
    with pytest.raises(openai.NotFoundError, match="no embedding model; --embedding-model-id loads one") as refused:
        await client(router).embeddings.create(model="tgi", input="Hello")
    error = refused.value
    assert (error.type, error.code) == ("invalid_request_error", "model_not_found")
    assert error.response.headers["x-should-retry"] == "false"
    for path, field in (("/embed", "inputs"), ("/predict", "inputs")):
        response = await router.http.post(path, json={field: "Hello"})
        assert (response.status_code, response.json()["error_type"]) == (404, "not_found")


async def test_the_local_shell(router: Router):
    router.say('{"name": "local_shell", "arguments": {"command": ["ls", "-l"], "timeout_ms": 5}}')
    tools: Any = [{"type": "local_shell"}]
    (item,) = (await create(router, tools=tools)).output
    assert item.type == "local_shell_call"
    assert (item.action.command, item.action.timeout_ms, item.action.env) == (["ls", "-l"], 5, {})
    output = {"type": "local_shell_call_output", "id": item.call_id, "output": "notes.txt"}
    router.say("Well.")
    said: Any = [{"role": "user", "content": "Hello"}, item.model_dump(), output]
    assert (await create(router, input=said, tools=tools)).output_text == "Well."
