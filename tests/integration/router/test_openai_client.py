"""The `openai` package, plain and async, against the router."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.integration.router.conftest import Router, RouterFactory

TEXT = "Rinse the rice. Then boil it."
HELLO: Any = [{"role": "user", "content": "Hello"}]


def client(router: Router, key: str = "none") -> AsyncOpenAI:
    """Returns a client; the test closes it, since its connections belong to the event loop of the test."""
    return AsyncOpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0)


async def test_a_conversation(router: Router):
    async with client(router) as api:
        answer = await api.chat.completions.create(model="tgi", messages=HELLO, logprobs=True, top_logprobs=2)
        assert answer.choices[0].message.content == TEXT
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].logprobs is not None
        assert answer.usage is not None
        plain = OpenAI(base_url=f"{router.url}/v1", api_key="none")
        again = await asyncio.to_thread(lambda: plain.chat.completions.create(model="tgi", messages=HELLO))
        assert again.choices[0].message.content == TEXT


async def test_a_stream(router: Router):
    length = router.say(TEXT)
    async with client(router) as api:
        stream = await api.chat.completions.create(
            model="tgi", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == TEXT
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == length


async def test_completions(router: Router):
    async with client(router) as api:
        answer = await api.completions.create(model="tgi", prompt=["Hello", "Hi"], max_tokens=100)
        assert [choice.text for choice in answer.choices] == [TEXT, TEXT]
        stream = await api.completions.create(model="tgi", prompt="Hello", max_tokens=100, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_a_tool(router: Router):
    router.say('{"name": "clock", "arguments": {"zone": "UTC"}}')
    tools: Any = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
    async with client(router) as api:
        answer = await api.chat.completions.create(model="tgi", messages=HELLO, tools=tools)
        assert answer.choices[0].message.tool_calls is not None
        call: Any = answer.choices[0].message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("clock", '{"zone": "UTC"}')
        async with api.chat.completions.stream(model="tgi", messages=HELLO, tools=tools) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.tool_calls is not None
        streamed = final.choices[0].message.tool_calls[0]
        assert (streamed.function.name, json.loads(streamed.function.arguments)) == ("clock", {"zone": "UTC"})
        conversation: Any = [
            *HELLO,
            answer.choices[0].message,
            {"role": "tool", "content": "12:00", "tool_call_id": call.id},
        ]
        router.say(TEXT)
        after = await api.chat.completions.create(model="tgi", messages=conversation)
        assert after.choices[0].message.content == TEXT


async def test_a_stream_is_put_together_as_a_message_that_the_conversation_goes_on_with(router: Router):
    async with client(router) as api:
        async with api.chat.completions.stream(model="tgi", messages=HELLO) as stream:
            message: Any = (await stream.get_final_completion()).choices[0].message
        assert (message.role, message.content) == ("assistant", TEXT)
        conversation: Any = [*HELLO, message, {"role": "user", "content": "And then?"}]
        after = await api.chat.completions.create(model="tgi", messages=conversation)
        assert after.choices[0].message.content == TEXT


async def test_errors(routers: RouterFactory):
    router = await routers(max_concurrent_requests=1, shard={"step_seconds": 0.05})
    async with client(router) as api:
        with pytest.raises(openai.BadRequestError, match="temperature") as refused:
            await api.chat.completions.create(model="tgi", messages=HELLO, temperature=-1)
        assert (refused.value.type, refused.value.param) == ("invalid_request_error", "temperature")
        running = asyncio.create_task(router.post("/generate", inputs="Hello"))
        await router.until(lambda: router.service.capacity.in_flight == 1)
        with pytest.raises(openai.RateLimitError):
            await api.chat.completions.create(model="tgi", messages=HELLO)
        await running
        router.shard.fail = "out of memory"
        with pytest.raises(openai.APIStatusError, match="out of memory") as failed:
            await api.chat.completions.create(model="tgi", messages=HELLO)
        assert failed.value.status_code == 424


async def test_an_error_within_a_stream(routers: RouterFactory):
    router = await routers(shard={"step_seconds": 0.02})
    async with client(router) as api:
        stream = await api.chat.completions.create(model="tgi", messages=HELLO, stream=True)
        await anext(aiter(stream))
        router.shard.fail = "out of memory"

        async def read_on() -> None:
            async for _ in stream:
                pass

        with pytest.raises(openai.APIError, match="out of memory"):
            await read_on()


async def test_a_client_that_leaves(routers: RouterFactory):
    router = await routers(shard={"step_seconds": 0.02})
    router.say(TEXT, end=False)
    async with client(router) as api:
        for create in (
            lambda: api.chat.completions.create(model="tgi", messages=HELLO, stream=True),
            lambda: api.completions.create(model="tgi", prompt=["a", "b"], stream=True),
        ):
            stream: Any = await create()
            await anext(aiter(stream))
            assert router.service.capacity.in_flight > 0
            await stream.close()
            await router.idle()


async def test_models(router: Router):
    async with client(router) as api:
        (model,) = (await api.models.list()).data
        assert (await api.models.retrieve(model.id)).id == "instant"
        with pytest.raises(openai.NotFoundError):
            await api.models.retrieve("another")


async def test_an_api_key(routers: RouterFactory):
    router = await routers(api_key="secret")
    async with client(router, "secret") as api:
        answer = await api.chat.completions.create(model="tgi", messages=HELLO)
    assert answer.choices[0].message.content == TEXT
    async with client(router, "wrong") as api:
        with pytest.raises(openai.AuthenticationError):
            await api.chat.completions.create(model="tgi", messages=HELLO)
