"""/v1/completions over a scheduler that answers at once."""

import json
from typing import Any

import httpx
import pytest

from shared.stubs import generate_pb2 as pb
from tests.fakes.router_service import RouterService, ScriptedScheduler
from tests.fakes.vocabularies import EOS, byte_level, sentence_piece
from tgi_server.router.api.routes.completion_logprobs import LogprobEntries


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json={"model": "m", "prompt": "hello", **body})


async def test_each_prompt_has_as_many_choices_as_were_asked_for(
    client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    scheduler.texts = ["a", "b", "c", "d"]
    answer = (await complete(client, prompt=["hello", "hello world"], n=2)).json()
    assert [(each["index"], each["text"]) for each in answer["choices"]] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert {each["finish_reason"] for each in answer["choices"]} == {"stop"}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 8, 11)
    assert answer["model"] == "maker/model"


async def test_a_text_ends_after_max_completion_tokens(client: httpx.AsyncClient, scheduler: ScriptedScheduler):
    for limit in ({"max_completion_tokens": 1}, {"max_completion_tokens": 1, "max_tokens": 1}):
        answer = (await complete(client, **limit)).json()
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 1)
    nothing = (await complete(client, max_completion_tokens=0, echo=True)).json()
    assert (nothing["choices"][0]["text"], nothing["usage"]["completion_tokens"]) == ("hello", 0)


async def test_a_stream_tells_its_usage_once_if_asked_to(client: httpx.AsyncClient):
    text = (await complete(client, stream=True, stream_options={"include_usage": True})).text
    *events, done = [event.removeprefix("data:").strip() for event in text.split("\n\n") if event]
    assert done == "[DONE]"
    *chunks, last = [json.loads(event) for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hello world"
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)


async def test_events_have_a_space_before_their_data(client: httpx.AsyncClient):
    """Clients cut off six characters."""
    chat = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
    responses = [
        await complete(client, stream=True, stream_options={"include_usage": True}),
        await client.post("/v1/chat/completions", json=chat),
        await client.post("/v1/responses", json={"input": "hello", "stream": True}),
    ]
    for response in responses:
        lines = [line for line in response.text.splitlines() if line.startswith("data")]
        assert len(lines) > 3
        assert all(line.startswith(("data: {", "data: [DONE]")) for line in lines)


async def test_logprobs_tell_each_token_and_its_place_though_its_text_is_held_back(client: httpx.AsyncClient):
    body = {"logprobs": 0, "stop": "hello world!"}
    (choice,) = (await complete(client, **body)).json()["choices"]
    told = choice["logprobs"]
    assert (choice["text"], told["tokens"]) == ("hello world", ["hello", " world", EOS])
    assert told["text_offset"] == [0, 5, 11]
    text = (await complete(client, **body, stream=True)).text
    *events, _ = [event.removeprefix("data:") for event in text.split("\n\n") if event]
    streamed = [json.loads(event)["choices"][0]["logprobs"] for event in events]
    for column, values in told.items():
        assert [each for entries in streamed for each in entries[column]] == values


@pytest.mark.parametrize(
    ("text", "first", "tokens", "offsets"),
    [
        ("hello world", 0, ["hello", " world"], [0, 5]),
        ("hello hello world", -2, ["hello", " world"], [6, 11]),
        ("hello\ufffd", 0, ["hello", r"bytes:\xef", r"bytes:\xbf", r"bytes:\xbd"], [0, 5, 5, 5]),
    ],
)
def test_the_entries_of_a_prompt_lie_in_its_text(text: str, first: int, tokens: list[str], offsets: list[int]):
    """Prompts that were cut to their last tokens, or end with what may be a part of a character, are none other."""
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False).ids[first:]
    entries = LogprobEntries(tokenizer, show_special=False)
    entries.prompt(pb.PrefillTokens(ids=ids, logprobs=[-1.0] * len(ids)), text)
    entries.token(ids[0], tokens[0], -1.0, pb.TopTokens(ids=ids, logprobs=[-1.0] * len(ids)))
    told = entries.take()
    assert told.tokens == [*tokens, tokens[0]]
    assert told.text_offset == [*offsets, len(text)]
    assert told.top_logprobs[-1].keys() == set(tokens)


@pytest.mark.parametrize("whole_words", [True, False])
def test_the_first_token_of_a_text_has_no_space_that_the_text_does_not_have(whole_words: bool):
    tokenizer = sentence_piece()
    ids = [259, 260] if whole_words else tokenizer.encode("hello world", add_special_tokens=False).ids
    assert tokenizer.token_name(ids[0]).startswith(" ")
    entries = LogprobEntries(tokenizer, show_special=False)
    entries.prompt(pb.PrefillTokens(ids=ids, logprobs=[-1.0] * len(ids)), "hello world")
    told = entries.take()
    assert "".join(told.tokens) == "hello world"
    assert told.text_offset == [len("".join(told.tokens[:index])) for index in range(len(ids))]


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"n": 9}, "`n` is 9; it must be 1 to 8"),
        ({"prompt": []}, "the number of prompts must be 1 to 8, not 0"),
        ({"prompt": ["hello"] * 9}, "the number of prompts must be 1 to 8, not 9"),
        ({"prompt": ["hello"] * 3, "n": 3}, "the number of prompts times `n` must be 1 to 8, not 9"),
        ({"prompt": ["hello"] * 5, "best_of": 2}, "the number of prompts times `best_of` must be 1 to 8, not 10"),
        ({"n": 2, "best_of": 1}, "`best_of` is 1; it must be at least `n`, which is 2"),
        ({"prompt": ["hello", ""]}, "`prompt` must not be empty"),
        (
            {"max_tokens": 2, "max_completion_tokens": 1},
            "`max_tokens` is 2 and `max_completion_tokens` is 1; give one",
        ),
    ],
)
async def test_what_breaks_a_rule_is_refused_before_anything_is_generated(
    client: httpx.AsyncClient, scheduler: ScriptedScheduler, body: dict[str, Any], told: str
):
    response = await complete(client, **body)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == told
    assert not scheduler.submitted


async def test_a_request_whose_sequences_do_not_all_fit_is_refused_whole(
    router: RouterService, client: httpx.AsyncClient, scheduler: ScriptedScheduler
):
    router.service.capacity.take(5, "127.0.0.1")
    assert (await complete(client, n=4)).status_code == 429
    assert not scheduler.submitted
    assert router.service.capacity.in_flight == 5
    assert (await complete(client, n=3)).status_code == 200
