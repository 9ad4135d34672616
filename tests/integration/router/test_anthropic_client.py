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


async def test_no_tokens_are_a_prompt_that_is_computed(router: Router, client: anthropic.AsyncAnthropic) -> None:
    router.say("Rinse the rice.")
    turns: Any = [{"role": "user", "content": "Hello " * 200}]
    chosen: Any = {"type": "any"}
    made = await client.messages.create(model="any", max_tokens=0, messages=turns, tools=[WEATHER], tool_choice=chosen)
    assert (made.content, made.stop_reason, made.usage.output_tokens) == ([], "max_tokens", 0)
    again = await client.messages.create(model="any", max_tokens=50, messages=turns, tools=[WEATHER])
    cached = again.usage.cache_read_input_tokens or 0
    assert cached == made.usage.input_tokens // 128 * 128 > 0  # in steps, as everybody shares the cache
    with pytest.raises(anthropic.BadRequestError, match="`max_tokens` cannot be 0 when streaming"):
        await client.messages.create(model="any", max_tokens=0, messages=turns, stream=True)


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
        assert len(message.content[0].signature) == 32
        async with client.messages.stream(**asked, thinking=enabled) as stream:
            streamed = await stream.get_final_message()
        assert [block.type for block in streamed.content] == ["thinking", "text"]
        assert streamed.content[0] == message.content[0]
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
        ({"max_tokens": -1}, "`max_tokens` is -1; it must be at least 0"),
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
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "source": {"type": "base64", "media_type": "application/pdf", "data": ""},
                            }
                        ],
                    }
                ]
            },
            "the type 'base64' is not supported here: this server reads no files",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "document",
                                "source": {"type": "text", "media_type": "text/plain", "data": "Rice."},
                                "citations": {"enabled": True},
                            }
                        ],
                    }
                ]
            },
            "`messages[0].content[0].citations` is not supported here",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "Hi"}]}]},
            "content[0].type`: Field required",
        ),
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
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
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


def prompt_of(router: Router) -> str:
    """Returns the last prompt that the shard got."""
    return router.service.text.tokenizer.decode(list(router.shard.received[-1].input_ids))


async def test_tools_that_the_client_runs_are_functions_and_others_are_left_out(
    router: Router, client: anthropic.AsyncAnthropic, routers: RouterFactory
) -> None:
    tools: Any = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool", "max_characters": 100},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "of_the_future_20300101", "name": "future"},
        {**WEATHER, "input_examples": [{"place": "Rome"}], "defer_loading": True},
    ]
    router.say('{"name": "bash", "arguments": {"command": "ls"}}')
    raw = await client.messages.with_raw_response.create(
        model="any", max_tokens=50, messages=HELLO, tools=tools, tool_choice={"type": "any"}
    )
    (call,) = (await raw.parse()).content
    assert call.type == "tool_use"
    assert (call.name, call.input) == ("bash", {"command": "ls"})
    assert raw.headers["x-ignored-fields"] == "tools[0] (web_search_20250305); tools[4] (of_the_future_20300101)"
    prompt = prompt_of(router)
    assert "str_replace" in prompt
    assert "Rome" in prompt
    assert "old_path" in prompt
    assert "web_search" not in prompt
    strict: Router = await routers(strict_fields=True)
    async with client_of(strict) as other:
        with pytest.raises(anthropic.BadRequestError, match=r"`tools\[0\]` has the type 'web_search_20250305'"):
            await other.messages.create(model="any", max_tokens=50, messages=HELLO, tools=tools)


async def test_a_system_message_stands_where_it_was_sent(router: Router, client: anthropic.AsyncAnthropic) -> None:
    turns: Any = [
        *HELLO,
        {"role": "system", "content": "Until the next turn.", "clear_at": "next_user_message"},
        {"role": "assistant", "content": "Hi."},
        {"role": "system", "content": "Answer in French."},
        {"role": "user", "content": "And now?"},
    ]
    await client.beta.messages.create(model="any", max_tokens=5, messages=turns, system="Be brief.")
    prompt = prompt_of(router)
    assert prompt.index("Be brief.") < prompt.index("Answer in French.")
    assert "Until" not in prompt
    await client.beta.messages.create(model="any", max_tokens=5, messages=turns[:2], system="Be brief.")
    assert "Until the next turn." in prompt_of(router)


async def test_a_thread_is_refused_with_what_clients_look_for(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refusal:
        await client.messages.create(
            model="any", max_tokens=5, messages=HELLO, extra_body={"thread": {"type": "create"}}
        )
    body: Any = refusal.value.body
    assert body["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_the_tool_runner_of_the_sdk_runs_a_tool(router: Router, client: anthropic.AsyncAnthropic) -> None:
    @anthropic.beta_async_tool
    async def get_weather(place: str) -> str:
        """Tells the weather."""
        router.say("It is sunny.")
        return f"Sunny in {place}."

    router.say(CALL)
    runner = client.beta.messages.tool_runner(model="any", max_tokens=50, messages=HELLO, tools=[get_weather])
    message = await runner.until_done()
    assert message.content[0].type == "text"
    assert message.content[0].text == "It is sunny."
    assert "Sunny in Paris." in prompt_of(router)


async def test_a_block_of_billing_is_not_part_of_the_prompt(router: Router, client: anthropic.AsyncAnthropic) -> None:
    counted = []
    for cch in ("a1b2c", "ffffff0"):
        system: Any = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
        ]
        await client.messages.create(model="any", max_tokens=5, messages=HELLO, system=system)
        counted.append(list(router.shard.received[-1].input_ids))
    assert "billing" not in prompt_of(router)
    assert counted[0] == counted[1]


async def test_documents_and_search_results_are_read_as_text(router: Router, client: anthropic.AsyncAnthropic) -> None:
    document: Any = {
        "type": "document",
        "title": "Of rice",
        "context": "A cookbook",
        "source": {"type": "text", "media_type": "text/plain", "data": "Rinse the rice."},
    }
    nested: Any = {
        "type": "document",
        "source": {"type": "content", "content": [{"type": "text", "text": "Boil it."}]},
        "citations": {"enabled": False},
    }
    found: Any = {
        "type": "search_result",
        "source": "https://example.com",
        "title": "Salt",
        "content": [{"type": "text", "text": "Add salt."}],
    }
    call: Any = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "a", "content": [found, nested]}
    turns: Any = [
        {"role": "user", "content": [document, {"type": "text", "text": "How?"}]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    await client.messages.create(model="any", max_tokens=5, messages=turns)
    prompt = prompt_of(router)
    said = ("Of rice", "A cookbook", "Rinse the rice.", "How?", "Salt", "https://example.com", "Add salt.", "Boil it.")
    places = [prompt.index(text) for text in said]
    assert places == sorted(places)


async def test_blocks_of_tools_that_anthropic_runs_are_left_out(
    router: Router, client: anthropic.AsyncAnthropic
) -> None:
    turns: Any = [
        *HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rice"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "compaction", "content": "Rice was discussed."},
                {"type": "mcp_tool_use", "id": "m", "name": "look_up", "server_name": "mcp", "input": {}},
                {"type": "redacted_thinking", "data": "x"},
            ],
        },
        {"role": "user", "content": [{"type": "mcp_tool_result", "tool_use_id": "m", "content": "Found."}]},
    ]
    raw = await client.messages.with_raw_response.create(model="any", max_tokens=5, messages=turns)
    assert raw.headers["x-ignored-fields"] == (
        "messages[1].content[0] (server_tool_use); messages[1].content[1] (web_search_tool_result)"
    )
    prompt = prompt_of(router)
    assert "Rice was discussed." in prompt
    assert "Found." in prompt


TOOL_TURNS: Any = [
    *HELLO,
    *(
        turn
        for index in range(4)
        for turn in (
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": f"Idea {index}.", "signature": "s"},
                    {"type": "tool_use", "id": f"t{index}", "name": "get_weather", "input": {"place": f"Town {index}"}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": f"t{index}", "content": f"Result {index}."}],
            },
        )
    ),
]


async def edit(client: anthropic.AsyncAnthropic, turns: Any, *edits: Any) -> Any:
    """Returns the message for a request with these edits."""
    return await client.beta.messages.create(
        model="any", max_tokens=5, messages=turns, tools=[WEATHER], context_management={"edits": list(edits)}
    )


@pytest.mark.parametrize(
    "edits",
    [
        [],
        [{"type": "clear_thinking_20251015", "keep": "all"}],
        [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}],
        [{"type": "clear_thinking_20251015"}],
        [{"type": "clear_tool_uses_20250919"}],
        [{"type": "clear_tool_uses_20250919", "trigger": {"type": "tool_uses", "value": 4}}],
        [{"type": "compact_20260112", "trigger": None}],
    ],
)
async def test_edits_that_change_nothing_are_accepted(
    router: Router, client: anthropic.AsyncAnthropic, edits: Any
) -> None:
    message = await edit(client, TOOL_TURNS, *edits)
    assert message.context_management.applied_edits == []
    assert "Result 0." in prompt_of(router)
    counted = await client.beta.messages.count_tokens(
        model="any", messages=TOOL_TURNS, tools=[WEATHER], context_management={"edits": edits}
    )
    assert counted.context_management is not None
    assert counted.context_management.original_input_tokens == counted.input_tokens


async def test_results_of_earlier_calls_are_cleared(router: Router, client: anthropic.AsyncAnthropic) -> None:
    clear: Any = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 10},
        "keep": {"type": "tool_uses", "value": 1},
        "clear_tool_inputs": True,
    }
    message = await edit(client, TOOL_TURNS, clear)
    (applied,) = message.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == ("clear_tool_uses_20250919", 3)
    prompt = prompt_of(router)
    assert "Result 2." not in prompt
    assert "Town 2" not in prompt
    assert "Result 3." in prompt
    assert "Town 3" in prompt
    too_little = {**clear, "clear_at_least": {"type": "input_tokens", "value": 10_000}}
    assert (await edit(client, TOOL_TURNS, too_little)).context_management.applied_edits == []
    others = {**clear, "exclude_tools": ["get_weather"]}
    assert (await edit(client, TOOL_TURNS, others)).context_management.applied_edits == []


async def test_thoughts_of_earlier_turns_are_cleared_and_reported(routers: RouterFactory) -> None:
    router: Router = await routers(reasoning_parser="qwen3")
    turns: Any = [*TOOL_TURNS, {"role": "assistant", "content": "Done."}, *HELLO]
    turns += [{"role": "assistant", "content": [{"type": "thinking", "thinking": "Last.", "signature": ""}]}, *HELLO]
    async with client_of(router) as client:
        async with client.beta.messages.stream(
            model="any",
            max_tokens=5,
            messages=turns,
            tools=[WEATHER],
            context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        ) as stream:
            streamed: Any = await stream.get_final_message()
        (applied,) = streamed.context_management.applied_edits
        # The calls and what follows them are one turn.
        assert (applied.type, applied.cleared_thinking_turns) == ("clear_thinking_20251015", 1)


async def test_a_compaction_is_refused_only_where_it_would_happen(client: anthropic.AsyncAnthropic) -> None:
    compact: Any = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 10}}
    with pytest.raises(anthropic.BadRequestError, match=r"`compact_20260112` .* above its trigger of 10"):
        await edit(client, TOOL_TURNS, compact)


async def test_a_stream_has_pings_and_the_signature_of_its_thoughts(routers: RouterFactory) -> None:
    router: Router = await routers(reasoning_parser="qwen3")
    router.say("<think>Rice is dry.</think>Rinse it.")
    response = await router.post(
        "/v1/messages", messages=HELLO, max_tokens=50, stream=True, thinking={"type": "between_tools"}
    )
    events = [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]
    assert events[:3] == ["message_start", "ping", "content_block_start"]
    assert 'data: {"type":"ping"}' in response.text
    deltas = [line for line in response.text.splitlines() if "_delta" in line and line.startswith("data")]
    kinds = [kind for line in deltas for kind in ("thinking", "signature", "text") if f'"{kind}_delta"' in line]
    assert list(dict.fromkeys(kinds)) == ["thinking", "signature", "text"]


async def test_models_have_anthropics_form_for_its_clients(router: Router, client: anthropic.AsyncAnthropic) -> None:
    page = await client.models.list()
    (model,) = page.data
    assert (model.type, model.display_name, page.has_more) == ("model", model.id, False)
    assert model.created_at.year > 2000
    assert model.max_input_tokens
    assert (await client.models.retrieve(model.id)).id == model.id
    assert [each.id async for each in client.models.list(limit=1)] == [model.id]
    with pytest.raises(anthropic.NotFoundError) as refusal:
        await client.models.retrieve("another")
    body: Any = refusal.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    for query in ("limit=0", "after_id=another"):
        refused = await router.http.get(f"/v1/models?{query}", headers={"anthropic-version": "2023-06-01"})
        assert refused.status_code == 400


async def test_batches_are_refused_by_name(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="message batches are not supported here") as refusal:
        await client.messages.batches.create(requests=[])
    body: Any = refusal.value.body
    assert (refusal.value.status_code, body["error"]["type"]) == (404, "not_found_error")
    with pytest.raises(anthropic.APIStatusError, match="message batches are not supported here"):
        await client.messages.batches.retrieve("a")


async def test_more_tokens_than_fit_are_as_many_as_fit(router: Router, client: anthropic.AsyncAnthropic) -> None:
    message = await client.messages.create(model="any", max_tokens=32_000, messages=HELLO, timeout=60)
    assert message.stop_reason == "end_turn"
    received = router.shard.received[-1]
    assert len(received.input_ids) + received.max_new_tokens == router.service.limits.max_total_tokens
    router.say("Rice. ", end=False)
    full = await client.messages.create(model="any", max_tokens=32_000, messages=HELLO, timeout=60)
    assert full.stop_reason == "model_context_window_exceeded"
