"""/v1/messages, with Anthropic's own client as PyPI has it."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import pytest

from tests.integration.router.conftest import Router, RouterFactory

HELLO: Any = [{"role": "user", "content": "Hello"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
CALL = '{"name": "get_weather", "arguments": {"place": "Paris"}}'


def client_of(router: Router, key: str = "any") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=router.url, api_key=key, max_retries=0)


@pytest.fixture
async def client(router: Router) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with client_of(router) as made:
        yield made


async def test_a_message(router: Router, client: anthropic.AsyncAnthropic) -> None:
    length = router.say("Rinse the rice.")
    message = await client.messages.create(
        model="any", max_tokens=50, messages=HELLO, system="Be brief.", extra_body={"temperature": 0.5, "top_k": 7}
    )
    (block,) = message.content
    assert (block.type, block.type == "text" and block.text) == ("text", "Rinse the rice.")
    assert (message.role, message.type, message.stop_reason, message.stop_sequence) == (
        *("assistant", "message"),
        *("end_turn", None),
    )
    assert message.usage.output_tokens == length
    received = router.shard.received[-1]
    sampling = received.sampling
    assert (sampling.top_k, sampling.do_sample, received.max_new_tokens) == (7, True, 50)
    prompt = router.service.text.tokenizer.decode(list(received.input_ids))
    assert prompt.index("Be brief.") < prompt.index("Hello")


async def test_stop_sequences_and_the_end_of_room(router: Router, client: anthropic.AsyncAnthropic) -> None:
    router.say("Rinse the rice. Then boil it.")
    stopped = await client.messages.create(model="any", max_tokens=50, messages=HELLO, stop_sequences=["!", " Then"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " Then")
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text == "Rinse the rice."
    cut = await client.messages.create(model="any", max_tokens=2, messages=HELLO)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 2)


async def test_a_stream(router: Router, client: anthropic.AsyncAnthropic) -> None:
    length = router.say("Rinse the rice.")
    async with client.messages.stream(model="any", max_tokens=50, messages=HELLO) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert [kinds[0], kinds[1], *kinds[-3:]] == [
        *("message_start", "content_block_start"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert message.content[0].type == "text"
    assert message.content[0].text == "Rinse the rice."
    assert (message.stop_reason, message.usage.output_tokens) == ("end_turn", length)


async def test_tools_are_called_and_their_results_read(router: Router, client: anthropic.AsyncAnthropic) -> None:
    router.say(CALL)
    message = await client.messages.create(
        model="any", max_tokens=50, messages=HELLO, tools=[WEATHER], tool_choice={"type": "any"}
    )
    (call,) = message.content
    assert call.type == "tool_use"
    assert (call.name, call.input, message.stop_reason) == ("get_weather", {"place": "Paris"}, "tool_use")
    async with client.messages.stream(
        model="any",
        max_tokens=50,
        messages=HELLO,
        tools=[WEATHER],
        tool_choice={"type": "tool", "name": WEATHER["name"]},
    ) as stream:
        streamed = await stream.get_final_message()
    assert streamed.content[0].type == "tool_use"
    assert (streamed.content[0].input, streamed.stop_reason) == ({"place": "Paris"}, "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "Sunny, 21 degrees."}
    turns: Any = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    router.say("It is sunny.")
    answer = await client.messages.create(model="any", max_tokens=50, messages=turns, tools=[WEATHER])
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "It is sunny."
    assert "Sunny, 21 degrees." in router.service.text.tokenizer.decode(list(router.shard.received[-1].input_ids))


async def test_thoughts_are_blocks_of_their_own_when_they_are_requested(routers: RouterFactory) -> None:
    router: Router = await routers(reasoning_parser="qwen3")
    router.say("<think>Rice is dry.</think>Rinse it.")
    async with client_of(router) as client:
        asked: Any = {"model": "any", "max_tokens": 2000, "messages": HELLO}
        enabled: Any = {"type": "enabled", "budget_tokens": 1024}
        message = await client.messages.create(**asked, thinking=enabled)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].type == "thinking"
        assert message.content[0].thinking == "Rice is dry."
        async with client.messages.stream(**asked, thinking=enabled) as stream:
            streamed = await stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text"]
        turns: Any = [*HELLO, {"role": "assistant", "content": streamed.content}, {"role": "user", "content": "And?"}]
        assert (await client.messages.count_tokens(model="any", messages=turns)).input_tokens > 5
        plain = await client.messages.create(**asked)
        assert [block.type for block in plain.content] == ["text"]


async def test_tokens_are_counted_as_they_are_computed(router: Router, client: anthropic.AsyncAnthropic) -> None:
    asked: Any = {"model": "any", "messages": HELLO, "system": "Be brief.", "tools": [WEATHER]}
    counted = await client.messages.count_tokens(**asked)
    message = await client.messages.create(**asked, max_tokens=50)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"extra_body": {"temperature": -1}}, "`temperature` is -1; it must be at least 0"),
        ({"max_tokens": 0}, "`max_tokens` is 0; it must be at least 1"),
        ({"stop_sequences": [""]}, "`stop_sequences` must not have an empty stop sequence"),
        ({"tool_choice": {"type": "any"}}, "there are no `tools`"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b"}}]}
                ]
            },
            "images are not supported",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "`document`"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "`tools.0.type`"),
        ({"extra_body": {"mcp_servers": [{"type": "url"}]}}, "`mcp_servers` is not supported here"),
    ],
)
async def test_refusals_have_anthropics_form_and_name_what_was_sent(
    client: anthropic.AsyncAnthropic, fields: Any, message: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as refusal:
        await client.messages.create(**{"model": "any", "max_tokens": 5, "messages": HELLO, **fields})
    body: Any = refusal.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert message in body["error"]["message"]


async def test_a_request_without_a_length_is_refused(router: Router) -> None:
    response = await router.post("/v1/messages", messages=HELLO)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "`max_tokens`: Field required"


async def test_a_prompt_that_is_too_long_is_called_so(client: anthropic.AsyncAnthropic) -> None:
    long: Any = [{"role": "user", "content": "rice " * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await client.messages.create(model="any", max_tokens=5, messages=long)


async def test_the_key_comes_in_anthropics_header(routers: RouterFactory) -> None:
    router: Router = await routers(api_key="secret")
    async with client_of(router, "secret") as client:
        assert (await client.messages.create(model="any", max_tokens=5, messages=HELLO)).role == "assistant"
    async with client_of(router, "wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="any", max_tokens=5, messages=HELLO)


async def test_a_stream_that_fails_ends_with_an_error_that_the_client_raises(
    router: Router, client: anthropic.AsyncAnthropic
) -> None:
    router.shard.fail = "the device is gone"
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(model="any", max_tokens=50, messages=HELLO) as stream:
            await stream.get_final_message()
