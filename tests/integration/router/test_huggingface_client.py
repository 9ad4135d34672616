"""`huggingface_hub.InferenceClient`, plain and async, against the router."""

import asyncio
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import GenerationError, HfHubHTTPError, OverloadedError, ValidationError

from tests.integration.router.conftest import Router, RouterFactory

TEXT = "Rinse the rice. Then boil it."
HELLO = [{"role": "user", "content": "Hello"}]


async def test_a_text(router: Router):
    client = InferenceClient(router.url)
    assert await asyncio.to_thread(client.text_generation, "Hello") == TEXT
    assert await AsyncInferenceClient(router.url).text_generation("Hello") == TEXT


async def test_details(router: Router):
    length = router.say(TEXT)
    output = await AsyncInferenceClient(router.url).text_generation(
        "Hello", details=True, decoder_input_details=True, best_of=2, do_sample=True, top_n_tokens=2
    )
    assert (output.generated_text, output.details.generated_tokens) == (TEXT, length)
    assert output.details.finish_reason == "eos_token"
    assert len(output.details.best_of_sequences) == 1
    assert output.details.prefill[0].text == "<|bos|>"
    assert len(output.details.top_tokens) == length


async def test_a_stream(router: Router):
    length = router.say(TEXT)

    def read() -> list[Any]:
        client = InferenceClient(router.url)  # its connections end with it
        return list(client.text_generation("Hello", stream=True, details=True))

    received = await asyncio.to_thread(read)
    assert len(received) == length
    assert received[-1].generated_text == TEXT
    assert received[-1].details.finish_reason == "eos_token"
    client = AsyncInferenceClient(router.url)
    texts = [text async for text in await client.text_generation("Hello", stream=True)]
    assert "".join(texts) == TEXT + "<|eos|>"


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_have_types(routers: RouterFactory, stream: bool):
    router = await routers(max_concurrent_requests=1, shard={"step_seconds": 0.05})

    client = AsyncInferenceClient(router.url)

    async def ask(**parameters: Any) -> None:
        result = await client.text_generation("Hello", stream=stream, **parameters)
        if stream:
            async for _ in result:
                pass

    with pytest.raises(ValidationError, match="temperature"):
        await ask(temperature=-1.0)
    running = asyncio.create_task(router.post("/generate", inputs="Hello"))
    await router.until(lambda: router.service.capacity.in_flight == 1)
    with pytest.raises(OverloadedError):
        await ask()
    await running
    router.shard.fail = "out of memory"
    with pytest.raises(GenerationError, match="out of memory"):
        await ask()


async def test_a_client_that_leaves(routers: RouterFactory):
    router = await routers(shard={"step_seconds": 0.02})
    router.say(TEXT, end=False)
    client = AsyncInferenceClient(router.url)
    stream = await client.text_generation("Hello", max_new_tokens=4000, stream=True)
    await anext(stream)
    assert router.service.capacity.in_flight == 1
    await client.close()
    await router.idle()


async def test_a_conversation(router: Router):
    client = InferenceClient(router.url)
    output = await asyncio.to_thread(client.chat_completion, HELLO, logprobs=True, top_logprobs=2)
    assert output.choices[0].message.content == TEXT
    assert output.usage.total_tokens == output.usage.prompt_tokens + output.usage.completion_tokens
    assert len(output.choices[0].logprobs.content[0].top_logprobs) == 2
    async_client = AsyncInferenceClient(router.url)
    stream = await async_client.chat_completion(HELLO, stream=True)
    assert "".join([chunk.choices[0].delta.content async for chunk in stream]) == TEXT


async def test_a_tool(router: Router):
    router.say('{"name": "clock", "arguments": {"zone": "UTC"}}')
    tool = {
        "type": "function",
        "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
    }
    output = await AsyncInferenceClient(router.url).chat_completion(HELLO, tools=[tool], tool_choice="required")
    (call,) = output.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("clock", '{"zone": "UTC"}')


async def test_errors_of_a_conversation(router: Router):
    with pytest.raises(HfHubHTTPError, match="temperature") as caught:
        await AsyncInferenceClient(router.url).chat_completion(HELLO, temperature=-1.0)
    assert caught.value.response.status_code == 400


async def test_a_form(router: Router):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client = AsyncInferenceClient(router.url)
    await client.text_generation("Hello", grammar={"type": "json", "value": schema})
    await client.chat_completion(
        HELLO, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    )
    first, second = router.shard.received
    assert first.grammar.value == second.grammar.value != ""


async def test_an_api_key(routers: RouterFactory):
    router = await routers(api_key="secret")
    assert await AsyncInferenceClient(router.url, token="secret").text_generation("Hello") == TEXT
    with pytest.raises(HfHubHTTPError) as caught:
        await AsyncInferenceClient(router.url, token="wrong").chat_completion(HELLO)
    assert caught.value.response.status_code == 401
