"""A model whose `tokenizer_config.json` describes how its answers are parsed."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.integration.router.conftest import Router, RouterFactory
from tests.integration.router.test_chat import HELLO
from tgi_server import demo_model

TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}}},
}
TEMPLATE = {
    "start_anchor": "[assistant]",
    "fields": {
        "thinking": {"open": "[[", "close": "]]"},
        "tool_calls": {
            "open_pattern": r"\s*<f=(?P<name>\w+)>",
            "close": "</f>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<(?P<key>\w+)>(?P<value>.*?)</\w+>"},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
ANSWER = "[[Rain, hm.]] I look it up.\n<f=weather><days>3</days></f>\n<f=weather></f>"


@pytest.fixture
async def router(routers: RouterFactory, tmp_path: Path) -> Router:
    config = json.loads((demo_model.PATH / "tokenizer_config.json").read_text())
    chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools }}[assistant]"
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "chat_template": chat_template, "response_template": TEMPLATE}))
    return await routers(tokenizer_config_path=path)


async def test_thoughts_text_and_calls(router: Router):
    router.say(ANSWER)
    async with openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0) as client:
        asked: Any = {"model": "tgi", "messages": HELLO, "tools": [TOOL], "max_tokens": 100}
        (choice,) = (await client.chat.completions.create(**asked)).choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look it up."
        assert getattr(choice.message, "reasoning_content", None) == "Rain, hm."
        calls = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [
            ("weather", {"days": 3}),
            ("weather", {}),
        ]
        assert not router.shard.received[-1].HasField("grammar")
        deltas = [chunk.choices[0].delta async for chunk in await client.chat.completions.create(**asked, stream=True)]
        assert "".join(delta.content or "" for delta in deltas) == "I look it up."
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Rain, hm."
        told = [call.function for delta in deltas for call in delta.tool_calls or ()]
        assert [call.name for call in told if call is not None and call.name] == ["weather", "weather"]


async def test_a_call_that_must_come_is_bound(router: Router):
    router.say('{"function": {"_name": "weather", "_arguments": {"days": 3}}}')
    response = await router.post(
        "/v1/chat/completions", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=100
    )
    (call,) = response.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"days": 3}
    assert router.shard.received[-1].HasField("grammar")


async def test_its_thoughts_have_a_budget(router: Router):
    router.say("[[Rain, hm.]] It rains.")
    await router.post("/v1/chat/completions", messages=HELLO, max_tokens=100, thinking_token_budget=4)
    budget = router.shard.received[-1].thought_budget
    assert (budget.tokens, budget.begin, budget.end) == (4, "[[", "]]")


async def test_grammars_of_texts_that_are_not_enforced_are_reported(router: Router):
    grammar = {"syntax": "lark", "definition": 'start: "a"'}
    tool = {"type": "custom", "custom": {"name": "say", "format": {"type": "grammar", "grammar": grammar}}}
    router.say("Well.")
    response = await router.post("/v1/chat/completions", messages=HELLO, tools=[TOOL, tool], max_tokens=100)
    assert response.headers["x-unenforced-constraints"] == "tools[1].custom.format (lark)"
    router.say('{"function": {"_name": "say", "_arguments": {"input": "a"}}}')
    response = await router.post(
        "/v1/chat/completions", messages=HELLO, tools=[tool], tool_choice="required", max_tokens=100
    )
    assert "x-unenforced-constraints" not in response.headers
