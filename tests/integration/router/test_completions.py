"""/v1/completions, as OpenAI's clients know it."""

import json
from typing import Any

import pytest

from tests.integration.router.conftest import Router, events
from tgi_server.router.schemas.completions import Chunk, CompletionFinal

TEXT = "Rinse the rice. Then boil it."


async def complete(router: Router, **body: Any) -> dict[str, Any]:
    response = await router.post("/v1/completions", **body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    CompletionFinal.model_validate(answer)
    return answer


async def complete_stream(router: Router, **body: Any) -> list[dict[str, Any]]:
    response = await router.post("/v1/completions", stream=True, **body)
    assert response.status_code == 200, response.text
    *received, done = events(response.text)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in received]
    for chunk in chunks:
        Chunk.model_validate(chunk)
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
    for body in ({"prompt": ["a"] * 5}, {"prompt": ["a"] * 3, "n": 2}, {"prompt": []}, {"prompt": "a", "n": 0}):
        response = await router.post("/v1/completions", **body)
        assert response.status_code == 422
        assert "--max-client-batch-size" in response.json()["error"]["message"]


async def test_a_stream_of_several_prompts(router: Router):
    length = router.say(TEXT)
    chunks = await complete_stream(router, prompt=["Hello", "Hello there"])
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(chunk["choices"][0]["text"] for chunk in mine) == TEXT
        assert [chunk["choices"][0]["finish_reason"] for chunk in mine] == [""] * (len(mine) - 1) + ["stop"]
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


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"prompt": ""}, "must not be empty"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": [1, 2]}, "prompt"),
        ({}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_completion_request_that_breaks_a_rule_is_refused(
    router: Router, body: dict[str, Any], told: str, stream: bool
):
    response = await router.post("/v1/completions", **body, stream=stream)
    assert response.status_code == 422
    assert told in response.json()["error"]["message"]
    assert router.service.capacity.in_flight == 0
