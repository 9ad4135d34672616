"""What evaluation suites ask of /v1/completions, on the wire, and compared with `transformers` in float32."""

import json
from functools import cache
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.servers import TextGenerationServer
from tgi_server import demo_model

PROMPTS = ["How long do I boil an egg?\nFor about", "Rinse the rice, größer and 12 times, then"]


@cache
def reference() -> tuple[Any, Any]:
    """The bundled model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(demo_model.PATH, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(demo_model.PATH)


def expected(ids: list[int]) -> tuple[list[float], list[float]]:
    """The log-probability of each token but the first, and the largest in its place."""
    with torch.inference_mode():
        logprobs = reference()[0](torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), logprobs.amax(-1).tolist()


def complete(server: TextGenerationServer, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json={"model": "demo", **body}, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_likelihood_of_texts(demo_server: TextGenerationServer, max_tokens: int) -> None:
    """The request that lm-eval makes, with the prompts as tokens, and one that generates nothing."""
    prompts = [reference()[1](text)["input_ids"] for text in PROMPTS]
    body = {"prompt": prompts, "temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    answer = complete(demo_server, **body)
    assert answer["usage"]["completion_tokens"] == 2 * max_tokens
    for ids, choice in zip(prompts, answer["choices"], strict=True):
        told = choice["logprobs"]
        assert {len(column) for column in told.values()} == {len(ids) + max_tokens}
        assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
        chosen, largest = expected(ids)
        assert told["token_logprobs"][1 : len(ids)] == pytest.approx(chosen, abs=1e-4)
        best = [max(top.values()) for top in told["top_logprobs"][1 : len(ids)]]
        assert best == pytest.approx(largest, abs=1e-4)
        greedy = [token == top for token, top in zip(told["token_logprobs"][1 : len(ids)], best, strict=True)]
        assert greedy == [abs(one - other) < 1e-6 for one, other in zip(chosen, largest, strict=True)]


def test_a_text_is_split_as_evaluation_suites_count_its_tokens(demo_server: TextGenerationServer) -> None:
    """lm-eval without `tokenized_requests`: it takes the context's tokens, without BOS, off the front of the list."""
    context, continuation = "How long do I boil an egg?", " For 6 minutes."
    body = {"prompt": context + continuation, "temperature": 0, "max_tokens": 1, "logprobs": 1, "echo": True}
    (choice,) = complete(demo_server, **body)["choices"]
    tokenizer = reference()[1]
    start = len(tokenizer(context, add_special_tokens=False)["input_ids"])
    ids = tokenizer(context + continuation)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    told = choice["logprobs"]["token_logprobs"][start:-1]
    assert told == pytest.approx(expected(ids)[0][start:], abs=1e-4)
    assert choice["logprobs"]["text_offset"][start] == len(context)


def spelled(token: str) -> bytes:
    """The bytes of a token, of which those that are a part of a character are written as escapes."""
    name = token.removeprefix("bytes:")
    return token.encode() if name == token else bytes.fromhex(name.replace("\\x", ""))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_entries_lie_where_they_say(demo_server: TextGenerationServer, prompt: str) -> None:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "logprobs": 2, "echo": True}
    (choice,) = complete(demo_server, **body)["choices"]
    told = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    special = set(reference()[1].all_special_tokens)
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token in special or token.startswith("bytes:") or choice["text"].startswith(token, offset)
    assert b"".join(spelled(token) for token in told["tokens"] if token not in special) == choice["text"].encode()
    for token, logprob, top in list(zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True))[1:]:
        assert top[token] == logprob
        assert len(top) in (2, 3)


def test_a_stream_has_the_same_entries(demo_server: TextGenerationServer) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8, "logprobs": 1, "echo": True}
    (whole,) = complete(demo_server, **body)["choices"]
    with httpx.stream("POST", f"{demo_server.url}/v1/completions", json={**body, "stream": True}, timeout=60) as stream:
        events = [
            json.loads(line[5:]) for line in stream.iter_lines() if line.startswith("data:{") or line[5:7] == " {"
        ]
    choices = [choice for each in events for choice in each["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for column, values in whole["logprobs"].items():
        streamed = [value for choice in choices for value in choice["logprobs"][column]]
        if column in ("token_logprobs", "top_logprobs"):
            assert json.dumps(streamed, sort_keys=True).count("null") == json.dumps(values).count("null")
        else:
            assert streamed == values


def test_the_best_of_several_is_the_likeliest(demo_server: TextGenerationServer) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 1.5, "max_tokens": 8, "logprobs": 0}
    for seed in range(3):
        answer = complete(demo_server, **body, n=2, best_of=8, seed=seed)
        means = [
            sum(each["logprobs"]["token_logprobs"]) / len(each["logprobs"]["tokens"]) for each in answer["choices"]
        ]
        assert means == sorted(means, reverse=True)
