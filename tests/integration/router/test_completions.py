"""/v1/completions, as OpenAI's clients know it."""

import json
from typing import Any

import msgspec
import pytest

from tests.integration.router.conftest import Router, events, in_one_loop
from tgi_server.router.schemas.completions import Chunk, CompletionFinal

TEXT = "Rinse the rice. Then boil it."


async def complete(router: Router, **body: Any) -> dict[str, Any]:
    response = await router.post("/v1/completions", **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    msgspec.convert(answer, CompletionFinal)
    return answer


async def complete_stream(router: Router, **body: Any) -> list[dict[str, Any]]:
    response = await router.post("/v1/completions", stream=True, **body)
    assert response.status_code == 200, response.text
    *received, done = events(response.text)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in received]
    for chunk in chunks:
        msgspec.convert(chunk, Chunk)
    return chunks


async def test_one_prompt(router: Router):
    length = router.say(TEXT)
    answer = await complete(router, prompt="Hello")
    assert (answer["object"], answer["model"]) == ("text_completion", "instant")
    assert answer["choices"] == [{"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}]
    assert answer["usage"]["completion_tokens"] == length


async def test_several_prompts(router: Router):
    length = router.say(TEXT)
    answer = await complete(router, prompt=["Hello", "Hello there"])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    lengths = [len((await router.post("/tokenize", inputs=inputs)).json()) for inputs in ("Hello", "Hello there")]
    assert answer["usage"]["prompt_tokens"] == sum(lengths)
    assert answer["usage"]["completion_tokens"] == 2 * length


async def test_several_completions_of_each(router: Router):
    answer = await complete(router, prompt=["Hello", "Hello there"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


async def test_more_than_one_request_may_ask_for(router: Router):
    for body in ({"prompt": ["a"] * 129}, {"prompt": ["a"] * 3, "n": 43}, {"prompt": []}, {"prompt": "a", "n": 0}):
        response = await router.post("/v1/completions", **body)
        assert response.status_code == 400
        assert "must be" in response.json()["error"]["message"]


async def test_a_stream_of_several_prompts(router: Router):
    length = router.say(TEXT)
    chunks = await complete_stream(router, prompt=["Hello", "Hello there"])
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(chunk["choices"][0]["text"] for chunk in mine) == TEXT
        assert [chunk["choices"][0]["finish_reason"] for chunk in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert mine[-1]["usage"]["completion_tokens"] == length
        assert "usage" not in mine[0]


async def test_the_usage_of_a_stream(router: Router):
    length = router.say(TEXT)
    *chunks, last = await complete_stream(router, prompt=["a", "b"], stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2 * length)


async def test_a_stop_sequence_is_not_shown(router: Router):
    (choice,) = (await complete(router, prompt="Hello", stop=["ice. T"]))["choices"]
    assert choice["text"] == "Rinse the r"
    chunks = await complete_stream(router, prompt="Hello", stop=["ice. T"])
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Rinse the r"


@in_one_loop
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": ""}, "must not be empty"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "logprobs": 21}, "`logprobs` is 21; it must be 0 to 20"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "`best_of`"),
        ({"prompt": ["a"] * 50, "best_of": 3}, "`best_of`"),
        ({"prompt": [1, 2**20]}, "the token 1048576"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": [5] * 4_000, "n": 128, "echo": True, "logprobs": 20}, "`echo` would return 10752000 prompt tokens"),
        ({"prompt": [5] * 500_000}, "500000 tokens"),
        ({"prompt": "a", "guided_regex": "a" * 1_000_001}, "it has 1000001 bytes; at most 1000000 are compiled"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_request_that_breaks_a_rule_is_refused(
    shared_router: Router, body: dict[str, Any], told: str, stream: bool
):
    response = await shared_router.post("/v1/completions", **body, stream=stream)
    assert response.status_code == 400
    assert told in response.json()["error"]["message"]
    assert shared_router.service.capacity.in_flight == 0


async def test_prompts_may_be_tokens(router: Router):
    router.say(TEXT)
    tokens = [token["id"] for token in (await router.post("/tokenize", inputs="Hello there")).json()]
    one = await complete(router, prompt=tokens)
    assert list(router.shard.received[-1].input_ids) == tokens
    assert (one["choices"][0]["text"], one["usage"]["prompt_tokens"]) == (TEXT, len(tokens))
    several = await complete(router, prompt=[tokens, tokens[:1]])
    assert [choice["text"] for choice in several["choices"]] == [TEXT, TEXT]
    assert several["usage"]["prompt_tokens"] == len(tokens) + 1


async def test_the_prompt_may_be_shown(router: Router):
    router.say(TEXT)
    (choice,) = (await complete(router, prompt="Hello", echo=True))["choices"]
    assert choice["text"] == f"Hello{TEXT}"
    first, *others = await complete_stream(router, prompt="Hello", echo=True)
    assert first["choices"][0]["text"] == "Hello"
    assert "".join(chunk["choices"][0]["text"] for chunk in others) == TEXT


@pytest.mark.parametrize("echo", [False, True])
async def test_nothing_need_be_generated(router: Router, echo: bool):
    router.say(TEXT)
    answer = await complete(router, prompt="Hello", echo=echo, max_tokens=0)
    assert answer["choices"] == [
        {"index": 0, "text": "Hello" if echo else "", "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"]["completion_tokens"] == 0
    chunks = await complete_stream(router, prompt="Hello", echo=echo, max_tokens=0)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ("Hello" if echo else "")
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_the_best_of_several(router: Router):
    length = router.say(TEXT)
    answer = await complete(router, prompt=["a", "b"], n=1, best_of=3, temperature=1.0)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 6 * length
    response = await router.post("/v1/completions", prompt="a", best_of=2, stream=True)
    assert (response.status_code, "best_of" in response.json()["error"]["message"]) == (400, True)
