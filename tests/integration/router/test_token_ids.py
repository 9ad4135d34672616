"""`return_token_ids`, as vLLM's clients ask for the tokens of prompts and answers."""

import pytest

from tests.integration.router.conftest import Router, RouterFactory
from tests.integration.router.test_chat import CALL, HELLO, WEATHER, chat, chat_stream
from tests.integration.router.test_completions import TEXT, complete, complete_stream


async def test_chats(router: Router):
    router.say(TEXT)
    answer = await chat(router, return_token_ids=True, n=2)
    assert [choice["token_ids"] for choice in answer["choices"]] == [router.shard.tokens] * 2
    prompt = (await router.post("/chat_tokenize", messages=HELLO)).json()["tokenize_response"]
    assert answer["prompt_token_ids"] == [token["id"] for token in prompt]
    first, *others = await chat_stream(router, return_token_ids=True)
    assert first["prompt_token_ids"] == answer["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in others)
    ids = [token for chunk in (first, *others) for token in chunk["choices"][0]["token_ids"]]
    assert ids == router.shard.tokens


async def test_calls_of_tools(routers: RouterFactory):
    router = await routers(tool_call_parser="json")
    router.say(CALL)
    answer = await chat(router, return_token_ids=True, tools=[WEATHER])
    assert answer["choices"][0]["message"]["tool_calls"]
    assert answer["choices"][0]["token_ids"] == router.shard.tokens
    chunks = await chat_stream(router, return_token_ids=True, tools=[WEATHER])
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == router.shard.tokens


async def test_completions(router: Router):
    router.say(TEXT)
    answer = await complete(router, prompt=[[5, 6], [7]], return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[5, 6], [7]]
    assert [choice["token_ids"] for choice in answer["choices"]] == [router.shard.tokens] * 2
    chunks = await complete_stream(router, prompt=[[5, 6], [7]], return_token_ids=True)
    for index, prompt in enumerate(([5, 6], [7])):
        first, *others = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert first["prompt_token_ids"] == prompt
        assert all("prompt_token_ids" not in choice for choice in others)
        assert [token for choice in (first, *others) for token in choice["token_ids"]] == router.shard.tokens


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": False}])
async def test_nobody_gets_them_unasked(router: Router, asked: dict[str, bool]):
    assert "token_ids" not in (await chat(router, **asked))["choices"][0]
    assert "token_ids" not in (await complete(router, prompt="Hello", **asked))["choices"][0]
