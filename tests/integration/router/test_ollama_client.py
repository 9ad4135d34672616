"""The routes below /api/, with Ollama's own client as PyPI has it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.integration.router.conftest import Router, RouterFactory
from tests.servers import TextGenerationServer
from tgi_server import demo_model

ollama: Any = pytest.importorskip("ollama")

HELLO: Any = [{"role": "user", "content": "Hello"}]
TEXT = "Rinse the rice. Then boil it."
CALL = '{"name": "get_weather", "arguments": {"place": "Paris"}}'
SCHEMA = {"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}


def get_weather(place: str) -> str:
    """Tells the weather.

    Args:
        place: A city.
    """
    return f"Sunny in {place}."


@pytest.fixture
async def client(router: Router) -> AsyncIterator[Any]:
    async with ollama.AsyncClient(host=router.url) as made:
        yield made


def prompt_of(router: Router) -> str:
    """Returns the last prompt that the shard got."""
    return router.service.text.tokenizer.decode(list(router.shard.received[-1].input_ids))


async def test_a_chat(router: Router, client: Any) -> None:
    options = {"num_predict": 50, "temperature": 0.5, "top_k": 7, "repeat_penalty": 1.5, "num_ctx": 8192, "seed": 3}
    answer = await client.chat("any:latest", HELLO, options=options, keep_alive="5m")
    assert (answer.message.role, answer.message.content, answer.message.tool_calls) == ("assistant", TEXT, None)
    assert (answer.done, answer.done_reason) == (True, "stop")
    received = router.shard.received[-1]
    assert (answer.prompt_eval_count, answer.eval_count) == (len(received.input_ids), len(router.shard.tokens))
    assert 0 < answer.prompt_eval_duration + answer.eval_duration <= answer.total_duration
    sampling = received.sampling
    assert (sampling.top_k, sampling.seed, received.max_new_tokens) == (7, 3, 50)
    assert sampling.repetition_penalty == 1.5
    assert sampling.top_p == pytest.approx(0.9)
    assert answer.created_at


async def test_a_stream_is_lines_and_the_default(router: Router, client: Any) -> None:
    pieces = [piece async for piece in await client.chat("any", HELLO, stream=True)]
    assert "".join(piece.message.content for piece in pieces) == TEXT
    assert [piece.done for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    assert (pieces[-1].done_reason, pieces[-1].eval_count) == ("stop", len(router.shard.tokens))
    response = await router.post("/api/chat", messages=HELLO)
    assert response.headers["content-type"] == "application/x-ndjson"
    assert len(response.text.splitlines()) == len(pieces)
    cut = [piece async for piece in await client.chat("any", HELLO, stream=True, options={"num_predict": 2})]
    assert (cut[-1].done_reason, cut[-1].eval_count) == ("length", 2)


async def test_a_tool_is_called_and_its_result_read(router: Router, client: Any) -> None:
    router.say(CALL)
    answer = await client.chat("any", HELLO, tools=[get_weather])
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"place": "Paris"})
    assert (answer.message.content, answer.done_reason) == ("", "stop")
    pieces = [piece async for piece in await client.chat("any", HELLO, tools=[get_weather], stream=True)]
    (streamed,) = (piece.message.tool_calls[0] for piece in pieces if piece.message.tool_calls)
    assert streamed == call
    assert (pieces[-1].message.content, pieces[-1].done_reason) == ("", "stop")
    # The client sends no id: results are those of the calls, in their order.
    result = {"role": "tool", "tool_name": "get_weather", "content": "Sunny, 21 degrees."}
    router.say("It is sunny.")
    answer = await client.chat("any", [*HELLO, answer.message, result], tools=[get_weather])
    assert answer.message.content == "It is sunny."
    assert "Sunny, 21 degrees." in prompt_of(router)


async def test_a_result_has_the_prompt_that_it_has_on_the_chat_route(router: Router) -> None:
    function = {"name": "get_weather", "description": "Tells the weather.", "parameters": SCHEMA}
    tools = [{"type": "function", "function": function}]
    arguments = {"place": "Paris"}
    result = {"role": "tool", "content": "Sunny, 21 degrees."}
    call: dict[str, Any] = {"function": {"name": "get_weather", "arguments": arguments}}
    named = result | {"tool_name": "get_weather"}
    prompts = []
    for made, answered in ((call, result), (call, named), (call | {"id": "a"}, result | {"tool_call_id": "a"})):
        messages = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [made]}, answered]
        assert (await router.post("/api/chat", messages=messages, tools=tools)).status_code == 200
        prompts.append(prompt_of(router))
    made = {"id": "a", "type": "function", "function": call["function"] | {"arguments": json.dumps(arguments)}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [made]}, result | {"tool_call_id": "a"}]
    assert (await router.post("/v1/chat/completions", messages=messages, tools=tools)).status_code == 200
    assert set(prompts) == {prompt_of(router)}
    assert prompts[0].count("get_weather") >= 2


async def test_a_call_that_is_cut_off_has_what_there_is_of_its_arguments(router: Router, client: Any) -> None:
    router.say(CALL[:-6], end=False)
    options = {"num_predict": len(router.shard.tokens)}
    answer = await client.chat("any", HELLO, tools=[get_weather], options=options)
    (call,) = answer.message.tool_calls
    assert (call.function.arguments["place"][:2], answer.done_reason) == ("Pa", "length")


async def test_thoughts_come_apart_and_can_be_switched_off(routers: RouterFactory) -> None:
    router: Router = await routers(reasoning_parser="qwen3")
    router.say("<think>Rice is dry.</think>Rinse it.")
    async with ollama.AsyncClient(host=router.url) as client:
        for think in (None, True, "low"):
            answer = await client.chat("any", HELLO, think=think)
            assert (answer.message.thinking, answer.message.content) == ("Rice is dry.", "Rinse it.")
        pieces = [piece async for piece in await client.generate("any", "Hello", think=True, stream=True)]
        assert "".join(piece.thinking or "" for piece in pieces) == "Rice is dry."
        assert "".join(piece.response for piece in pieces) == "Rinse it."
        answer = await client.chat("any", HELLO, think=False)
        assert (answer.message.thinking, answer.message.content) == (None, "Rinse it.")


@pytest.mark.parametrize(("form", "schema"), [("json", {"type": "object"}), (SCHEMA, SCHEMA)])
async def test_the_form_of_an_answer(router: Router, client: Any, form: Any, schema: Any) -> None:
    router.say('{"minutes": 12}')
    answer = await client.chat("any", HELLO, format=form)
    assert answer.message.content == '{"minutes": 12}'
    grammar = json.loads(router.shard.received[-1].grammar.value)
    assert {name: grammar[name] for name in schema} == schema
    assert (await client.generate("any", "Hello", format=form)).response == '{"minutes": 12}'


async def test_a_prompt_with_and_without_the_template(router: Router, client: Any) -> None:
    answer = await client.generate("any", "Hello", system="Be brief.", options={"stop": [" Then"]})
    assert (answer.response, answer.done, answer.done_reason) == ("Rinse the rice.", True, "stop")
    prompt = prompt_of(router)
    assert prompt.index("Be brief.") < prompt.index("Hello") < len(prompt) - len("Hello")
    assert (await client.generate("any", "Hello", raw=True)).response == TEXT
    assert prompt_of(router).endswith("Hello")
    assert "user" not in prompt_of(router)
    pieces = [piece async for piece in await client.generate("any", "Hello", stream=True, raw=True)]
    assert "".join(piece.response for piece in pieces) == TEXT


async def test_log_probabilities(client: Any) -> None:
    answer = await client.chat("any", HELLO, logprobs=True, top_logprobs=2)
    assert "".join(entry.token for entry in answer.logprobs).startswith(TEXT)
    assert len(answer.logprobs) == answer.eval_count
    pieces = [piece async for piece in await client.generate("any", "Hello", logprobs=True, stream=True)]
    assert sum(len(piece.logprobs or ()) for piece in pieces) == pieces[-1].eval_count


async def test_a_request_that_says_nothing_has_the_model_loaded(router: Router, client: Any) -> None:
    before = len(router.shard.received)
    for keep_alive in ("5m", 0, -1):
        assert (await client.chat("any", [], keep_alive=keep_alive)).done_reason == "load"
        assert (await client.generate("any", keep_alive=keep_alive)).done_reason == "load"
    assert len(router.shard.received) == before


async def test_models_are_listed_and_shown(router: Router, client: Any) -> None:
    (listed,) = (await client.list()).models
    name = router.service.model.names[0]
    assert (listed.model, len(listed.digest), listed.size) == (name, 64, 0)
    assert listed.modified_at.year > 2000
    shown = await client.show(f"{name}:latest")
    most = router.service.limits.max_total_tokens
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == most
    assert shown.capabilities == ["completion", "tools"]
    assert shown.template == router.service.text.template.source
    (running,) = (await client.ps()).models
    assert (running.model, running.context_length, running.expires_at.year) == (name, most, 2300)
    version = (await router.http.get("/api/version")).json()["version"]
    assert [int(part) for part in version.partition("+")[0].split(".")] >= [0, 6, 4]  # which some clients want
    with pytest.raises(ollama.ResponseError, match="model 'another' not found") as refusal:
        await client.show("another")
    assert refusal.value.status_code == 404


async def test_only_what_is_served_can_be_pulled(router: Router, client: Any) -> None:
    name = router.service.model.names[0]
    assert (await client.pull(name)).status == "success"
    assert [each.status async for each in await client.pull(name, stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="model 'another' cannot be pulled: this server has") as refusal:
        async for _ in await client.pull("another", stream=True):
            pass
    assert refusal.value.status_code == 404
    for refused in (client.delete(name), client.copy(name, "b"), client.create("b", from_=name), client.push(name)):
        with pytest.raises(ollama.ResponseError, match="models are not created, copied, deleted or uploaded here"):
            await refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"temperature": -1}}, "`options.temperature` is -1; it must be at least 0"),
        ({"options": {"stop": [""]}}, "`options.stop` must not have an empty stop sequence"),
        ({"options": {"mirostat": 2}}, "`options.mirostat` is not supported here; leave it out"),
        ({"options": {"repeat_last_n": 32}}, "`options.repeat_last_n` is not supported here"),
        ({"format": "yaml"}, "`format`"),
        ({"think": True}, "`think` cannot be used: this model does not support thinking"),
        ({"messages": [{"role": "user", "images": ["aGk="]}]}, "images are not supported"),
        ({"messages": [{"role": "user", "content": "rice " * 5000}]}, "maximum context length"),
        ({"top_logprobs": 21}, "`top_logprobs` is 21; it must be at most 20"),
    ],
)
async def test_refusals_have_ollamas_form_and_name_what_was_sent(router: Router, fields: Any, message: str) -> None:
    for stream in (False, True):
        response = await router.post("/api/chat", **{"messages": HELLO, "stream": stream, **fields})
        assert response.status_code == 400
        assert response.headers["content-type"] == "application/json"
        assert response.json().keys() == {"error"}
        assert message in response.json()["error"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": "{{ .Prompt }}"}, "`template` is not supported here"),
        ({"suffix": "end"}, "`suffix` is not supported here"),
        ({"context": [1, 2]}, "`context` is not supported here"),
        ({"raw": True, "system": "Be brief."}, "`system` cannot be used with `raw`"),
    ],
)
async def test_what_a_prompt_cannot_have(client: Any, fields: Any, message: str) -> None:
    with pytest.raises(ollama.ResponseError, match=message) as refusal:
        await client.generate("any", "Hello", **fields)
    assert refusal.value.status_code == 400


async def test_a_stream_that_fails_ends_with_an_error_that_the_client_raises(router: Router, client: Any) -> None:
    router.shard.fail = "the device is gone"
    with pytest.raises(ollama.ResponseError, match="the device is gone"):
        async for _ in await client.chat("any", HELLO, stream=True):
            pass


async def test_the_key_is_that_of_the_other_routes(routers: RouterFactory) -> None:
    router: Router = await routers(api_key="secret")
    async with ollama.AsyncClient(host=router.url, headers={"authorization": "Bearer secret"}) as client:
        assert (await client.chat("any", HELLO)).message.content == TEXT
    async with ollama.AsyncClient(host=router.url) as client:
        assert len((await client.list()).models) == 1
        with pytest.raises(ollama.ResponseError) as refusal:
            await client.chat("any", HELLO)
        assert refusal.value.status_code == 401


@pytest.mark.slow
async def test_the_demo_model(demo_server: TextGenerationServer) -> None:
    async with ollama.AsyncClient(host=demo_server.url) as client:
        (model,) = (await client.list()).models
        options = {"temperature": 0, "num_predict": 30}
        whole = await client.chat(model.model, HELLO, options=options)
        pieces = [piece async for piece in await client.chat(model.model, HELLO, options=options, stream=True)]
        assert "".join(piece.message.content for piece in pieces) == whole.message.content != ""
        told = await client.chat(model.model, HELLO, format=SCHEMA, options=options)
        assert isinstance(json.loads(told.message.content)["minutes"], int)
        called = await client.chat(model.model, HELLO, tools=[get_weather], options=options)
        assert called.done
        (loaded,) = (await client.ps()).models
        weights = sum(file.stat().st_size for file in demo_model.PATH.glob("*.safetensors"))
        assert loaded.size == model.size == weights > 0
        assert loaded.size_vram in (0, weights)  # of a GPU
    async with httpx.AsyncClient(base_url=demo_server.url) as http:
        version = (await http.get("/api/version")).json()
        assert version["version"]
