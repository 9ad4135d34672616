"""/generate and /generate_stream, as TGI has them."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from tests.integration.router.conftest import Router, RouterFactory, events, in_one_loop
from tgi_server.router.api import event_stream
from tgi_server.router.schemas.generate import GenerateResponse, StreamResponse

TEXT = "Rinse the rice. Then boil it."


async def stream(router: Router, inputs: str = "Hello", **parameters: Any) -> list[dict[str, Any]]:
    response = await router.post("/generate_stream", inputs=inputs, parameters=parameters)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    parsed = [json.loads(event) for event in events(response.text)]
    for each in parsed:
        msgspec.convert(each, StreamResponse)
    return parsed


async def test_the_text_alone(router: Router):
    response = await router.post("/generate", inputs="Hello")
    assert response.status_code == 200
    assert response.json() == {"generated_text": TEXT}


async def test_details(router: Router):
    length = router.say(TEXT)
    response = await router.post(
        "/generate",
        inputs="Hello",
        parameters={"details": True, "decoder_input_details": True, "top_n_tokens": 2},
    )
    answer = response.json()
    msgspec.convert(answer, GenerateResponse)
    details = answer["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", length, None)
    assert "".join(token["text"] for token in details["tokens"]) == TEXT + "<|eos|>"
    assert [token["special"] for token in details["tokens"]] == [False] * (length - 1) + [True]
    assert details["tokens"][0]["logprob"] == -0.25
    assert [token["text"] for token in details["prefill"]][:2] == ["<|bos|>", "Hello"]
    assert details["prefill"][0]["logprob"] is None
    assert [len(top) for top in details["top_tokens"]] == [2] * length


async def test_headers(router: Router):
    response = await router.post("/generate", inputs="Hello", parameters={"max_new_tokens": 3})
    headers = response.headers
    assert headers["x-compute-type"] == "cpu"
    assert headers["x-compute-characters"] == "5"
    assert (headers["x-generated-tokens"], headers["x-finish-reason"]) == ("3", "length")
    prompt = await router.post("/tokenize", inputs="Hello")
    assert headers["x-prompt-tokens"] == str(len(prompt.json()))
    assert float(headers["x-compute-time"]) < 5
    for name in ("x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token"):
        assert 0 <= int(headers[name]) < 5000


async def test_a_length(router: Router):
    response = await router.post("/generate", inputs="Hello", parameters={"max_new_tokens": 2, "details": True})
    details = response.json()["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 2)


async def test_the_end_may_be_ignored(router: Router):
    length = router.say("a b")
    parameters = {"max_new_tokens": 2 * length, "ignore_eos": True, "details": True}
    response = await router.post("/generate", inputs="Hello", parameters=parameters)
    assert response.json()["generated_text"] == "a ba b"
    assert response.json()["details"]["generated_tokens"] == 2 * length


async def test_the_prompt_in_front(router: Router):
    parameters = {"return_full_text": True}
    response = await router.post("/generate", inputs="Hello", parameters=parameters)
    assert response.json()["generated_text"] == "Hello" + TEXT
    assert (await stream(router, **parameters))[-1]["generated_text"] == "Hello" + TEXT


async def test_a_stop_sequence_is_part_of_the_text(router: Router):
    parameters = {"stop": ["ice. T"], "details": True}
    response = await router.post("/generate", inputs="Hello", parameters=parameters)
    assert response.json()["generated_text"] == "Rinse the rice. T"
    assert response.json()["details"]["finish_reason"] == "stop_sequence"
    await router.idle()


async def test_a_stream(router: Router):
    length = router.say(TEXT)
    received = await stream(router, details=True)
    assert [event["index"] for event in received] == list(range(1, length + 1))
    assert "".join(event["token"]["text"] for event in received) == TEXT + "<|eos|>"
    assert all(event["generated_text"] is None and event["details"] is None for event in received[:-1])
    assert received[-1]["generated_text"] == TEXT
    assert received[-1]["token"]["special"]
    details = received[-1]["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", length)
    assert details["input_length"] == len((await router.post("/tokenize", inputs="Hello")).json())
    assert "top_tokens" not in received[0]


async def test_a_stream_tells_which_tokens_had_been_drafted(router: Router):
    router.say(TEXT)
    router.shard.drafted = set(router.shard.tokens[1:3])
    tokens = [event["token"] for event in await stream(router)]
    assert [token.get("drafted") for token in tokens] == [
        True if token["id"] in router.shard.drafted else None for token in tokens
    ]
    assert sum("drafted" in token for token in tokens) >= 2


async def test_a_stream_with_top_tokens(router: Router):
    assert all(len(event["top_tokens"]) == 3 for event in await stream(router, top_n_tokens=3))


async def test_a_streams_characters_are_whole(router: Router):
    router.say("日本 🍕!")
    received = await stream(router)
    texts = [event["token"]["text"] for event in received[:-1]]
    assert "".join(texts) == "日本 🍕!" == received[-1]["generated_text"]
    assert "" in texts
    assert "\ufffd" not in "".join(texts)


async def test_a_streams_last_token_ends_with_the_stop_sequence(router: Router):
    received = await stream(router, stop=["ice. T"], details=True)
    assert "".join(event["token"]["text"] for event in received) == "Rinse the rice. T"
    assert received[-1]["generated_text"] == "Rinse the rice. T"
    assert received[-1]["details"]["finish_reason"] == "stop_sequence"


async def test_stream_headers(router: Router):
    response = await router.post("/generate_stream", inputs="Hello")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-compute-type"] == "cpu"
    assert response.headers["x-compute-characters"] == "5"


async def test_best_of(router: Router):
    parameters = {"best_of": 2, "do_sample": True, "details": True, "return_full_text": True}
    answer = (await router.post("/generate", inputs="Hello", parameters=parameters)).json()
    msgspec.convert(answer, GenerateResponse)
    others = answer["details"]["best_of_sequences"]
    assert len(others) == 1
    assert answer["generated_text"] == others[0]["generated_text"] == "Hello" + TEXT
    seeds = {answer["details"]["seed"], others[0]["seed"]}
    assert seeds == {request.sampling.seed for request in router.shard.received}
    assert len(seeds) == 2


async def test_what_reaches_the_shard(router: Router):
    parameters = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "typical_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.4,
        "seed": 2**64 - 1,
        "watermark": True,
        "logit_bias": {"5": -3},
        "max_new_tokens": 4,
        "truncate": 3,
        "grammar": {"type": "regex", "value": "[a-z]+"},
    }
    assert (await router.post("/generate", inputs="Hello there", parameters=parameters)).status_code == 200
    (request,) = router.shard.received
    sampling = request.sampling
    assert sampling.do_sample
    assert sampling.temperature == pytest.approx(0.5)
    assert (sampling.top_k, sampling.seed, sampling.watermark) == (7, 2**64 - 1, True)
    assert sampling.top_p == pytest.approx(0.9)
    assert sampling.typical_p == pytest.approx(0.8)
    assert sampling.min_p == pytest.approx(0.1)
    assert sampling.repetition_penalty == pytest.approx(1.2)
    assert sampling.frequency_penalty == pytest.approx(0.3)
    assert sampling.presence_penalty == pytest.approx(0.4)
    assert dict(sampling.logit_bias) == {5: -3.0}
    assert len(request.input_ids) == 3
    assert request.grammar.value == "[a-z]+"
    assert not request.logprobs


@in_one_loop
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"inputs": "Hello", "parameters": {"max_new_tokens": 0}}', "max_new_tokens"),
        ('{"inputs": ""}', "must not be empty"),
        ("this is no JSON", "not JSON"),
        ("", "not JSON"),
        ("[]", "object"),
        ("{}", "`inputs`: Field required"),
        ('{"inputs": 3}', "`inputs`"),
        ('{"inputs": "Hello", "parameters": {"max_new_tokens": "20"}}', "`parameters.max_new_tokens`"),
        ('{"inputs": "Hello", "parameters": {"temperature": NaN}}', "`parameters.temperature`"),
        ('{"inputs": "Hello", "parameters": {"adapter_id": "x"}}', "adapter_id"),
        ('{"inputs": "Hello", "parameters": {"best_of": 2}}', "best_of"),
        ('{"inputs": "Hello", "parameters": {"max_new_tokens": 4000000000}}', "max_new_tokens"),
        ('{"inputs": "Hello", "parameters": {"max_new_tokens": 4096}}', "must be <= 4096"),
    ],
)
async def test_a_generate_request_that_breaks_a_rule_is_refused(shared_router: Router, body: str, told: str):
    series = 'tgi_request_failure{err="validation"}'
    before = await shared_router.metric(series)
    for path in ("/generate", "/generate_stream"):
        response = await shared_router.http.post(path, content=body)
        assert response.status_code == 422
        answer = response.json()
        assert answer.keys() == {"error", "error_type"}
        assert answer["error_type"] == "validation"
        assert told in answer["error"]
        assert "\n" not in answer["error"]
    assert (await shared_router.post("/generate", inputs="Hello")).status_code == 200
    assert await shared_router.metric(series) == before + 2


async def test_tokens_that_only_the_tokenizer_knows(routers: RouterFactory, caplog: pytest.LogCaptureFixture):
    """Tokens were added to the tokenizer, and the model has no embeddings of them."""
    known = 400
    router = await routers(shard={"vocab_size": known})
    tokenizer = router.service.text.tokenizer
    added = tokenizer.vocab_size - 1
    text = tokenizer.decode([added])
    assert tokenizer.encode(text, add_special_tokens=False).ids == [added]
    assert f"the tokenizer has {tokenizer.vocab_size} tokens, the model {known}" in caplog.text
    for path, field, status in (("/generate", "inputs", 422), ("/v1/completions", "prompt", 400)):
        answer = await router.post(path, model="instant", **{field: text})
        assert answer.status_code == status
        assert f"the prompt has the token {added}" in answer.text
        assert f"token ids of the model are 0 to {known - 1}" in answer.text
    assert not router.shard.received


async def test_a_client_that_reads_events_gets_its_error_as_one(router: Router):
    response = await router.http.post("/generate_stream", json={"inputs": ""}, headers={"accept": "text/event-stream"})
    assert response.status_code == 422
    assert response.headers["content-type"].startswith("text/event-stream")
    assert json.loads(events(response.text)[0])["error_type"] == "validation"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_is_too_large(router: Router, announced: bool):
    async def parts():
        for _ in range(10):
            yield b"x" * 1_000_000

    content = b"x" * 10_000_000 if announced else parts()
    response = await router.http.post("/generate", content=content)
    assert response.status_code == 413
    assert response.json()["error_type"] == "payload_too_large"
    assert "2000000" in response.json()["error"]
    assert (await router.post("/generate", inputs="Hello")).status_code == 200


async def test_too_many_requests(routers: RouterFactory):
    router = await routers(max_concurrent_requests=2, shard={"step_seconds": 0.05})
    running = [asyncio.create_task(router.post("/generate", inputs="Hello")) for _ in range(2)]
    await router.until(lambda: router.service.capacity.in_flight == 2)
    refused = await router.post("/generate", inputs="Hello")
    assert refused.status_code == 429
    assert refused.json()["error_type"] == "overloaded"
    assert [(await each).status_code for each in running] == [200, 200]
    assert (await router.post("/generate", inputs="Hello")).status_code == 200


async def test_a_shard_that_fails(router: Router):
    router.shard.fail = "out of memory"
    response = await router.post("/generate", inputs="Hello")
    assert response.status_code == 424
    assert response.json()["error_type"] == "generation"
    assert "out of memory" in response.json()["error"]
    router.shard.fail = None

    async def healthy() -> bool:
        return (await router.post("/generate", inputs="Hello")).status_code == 200

    await router.until(healthy)


async def test_a_shard_that_fails_within_a_stream(routers: RouterFactory):
    router = await routers(shard={"step_seconds": 0.02})
    received: list[dict[str, Any]] = []
    async with router.http.stream("POST", "/generate_stream", json={"inputs": "Hello"}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                received.append(json.loads(line.removeprefix("data:")))
                router.shard.fail = "out of memory"
    assert response.status_code == 200
    assert TEXT.startswith(received[0]["token"]["text"])
    assert received[-1]["error_type"] == "generation"


async def test_a_client_that_leaves_a_stream_frees_its_place_at_once(routers: RouterFactory):
    router = await routers(shard={"step_seconds": 0.02})
    parameters = {"max_new_tokens": 4000, "ignore_eos": True}
    body = {"inputs": "Hello", "parameters": parameters}
    async with router.http.stream("POST", "/generate_stream", json=body) as response:
        async for _ in response.aiter_lines():
            assert await router.metric("tgi_batch_current_size") == 1
            break
    await router.idle()
    assert await router.metric('tgi_request_failure{err="cancelled"}') == 1
    assert await router.metric("tgi_request_count") == 1


async def test_a_client_that_leaves_before_its_answer_frees_its_place_at_once(routers: RouterFactory):
    router = await routers(shard={"step_seconds": 0.02})
    await router.leave("/generate", inputs="Hello", parameters={"max_new_tokens": 4000, "ignore_eos": True})
    await router.idle()
    assert await router.metric('tgi_request_failure{err="cancelled"}') == 1


async def test_a_silent_stream_is_kept_open(routers: RouterFactory, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(event_stream, "_KEEP_ALIVE_SECONDS", 0.05)
    router = await routers(shard={"step_seconds": 0.3})
    response = await router.post("/generate_stream", inputs="Hello", parameters={"max_new_tokens": 2})
    assert ":\n\n" in response.text
    assert len(events(response.text)) == 2


async def test_grammars_fail_with_the_shards(router: Router):
    router.shard.fail = "the device is lost"
    parameters = {"grammar": {"type": "regex", "value": "a+"}}
    response = await router.post("/generate", inputs="Hello", parameters=parameters)
    assert response.status_code == 424
    assert "the device is lost" in response.json()["error"]


async def test_many_at_once(router: Router):
    async def one(number: int) -> None:
        parameters = {"max_new_tokens": 1 + number % 5, "ignore_eos": True}
        if number % 2:
            received = await stream(router, f"Hello {number}", **parameters)
            assert len(received) == parameters["max_new_tokens"]
        else:
            response = await router.post("/generate", inputs=f"Hello {number}", parameters=parameters)
            assert response.headers["x-generated-tokens"] == str(parameters["max_new_tokens"])

    await asyncio.gather(*(one(number) for number in range(60)))
    assert await router.metric("tgi_request_success") == 60
    assert router.service.capacity.in_flight == 0
