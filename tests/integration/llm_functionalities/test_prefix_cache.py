"""Prompts that are computed before they are needed: a real service, with real models and with stand-ins."""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import grpc
import httpx
import pytest

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.fakes.model_server import ModelServer
from tests.integration.llm_functionalities.service import Service, ask, running_service
from tests.servers import TextGenerationServer
from tests.timing import SECONDS, until

# The balancer knows where prompts with the same beginning go once it has 512 characters.
LONG = "Rinse the rice until the water is clear, then let it stand for ten minutes. " * 8
SHORT = "Rinse the rice"
WARM = {"object": "warm", "prompt_tokens": 9, "cached_tokens": 4, "ttl_seconds": 300}


@pytest.fixture(scope="module")
def stand_ins() -> Iterator[list[ModelServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ModelServer()) for _ in range(3)]


@pytest.fixture(scope="module")
def service(stand_ins: list[ModelServer]) -> Iterator[Service]:
    with running_service("--endpoint", ",".join(each.url for each in stand_ins)) as service:
        yield service


@pytest.fixture
def servers(stand_ins: list[ModelServer]) -> list[ModelServer]:
    for server in stand_ins:
        server.raw, server.raw_status, server.fault, server.sick = json.dumps(WARM).encode(), "200 OK", None, False
        server.requests.clear()
    return stand_ins


@pytest.fixture
def channel(service: Service, servers: list[ModelServer]) -> Iterator[grpc.Channel]:
    with service.channel() as channel:
        yield channel


def warm(channel: grpc.Channel, prompt: str, **more: Any) -> llm_pb2.WarmResponse:
    request = llm_pb2.WarmRequest(**more)
    request.formatted_prompt = prompt
    response: llm_pb2.WarmResponse = llm_pb2_grpc.LLMPrefixCacheStub(channel).Warm(request)
    return response


def test_a_prompt_of_a_real_model_is_cached(demo_server: TextGenerationServer) -> None:
    prompt = "A prompt that no other test begins with. " + LONG
    with running_service("--endpoint", demo_server.url) as service, service.channel() as channel:
        first = warm(channel, prompt, ttl_seconds=60, cache_key="test", timeout=60_000)
        assert (first.prompt_tokens > 128, first.cached_tokens) == (True, 0)
        body = {"prompt": prompt + "What comes next?", "max_tokens": 1}
        usage = httpx.post(f"{demo_server.url}/v1/completions", json=body, timeout=60).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 128
        assert warm(channel, prompt, timeout=60_000).cached_tokens >= 128


def used(server: TextGenerationServer) -> float:
    (found,) = re.findall(r"^tgi_early_answer_used_tokens_total (\S+)", httpx.get(f"{server.url}/metrics").text, re.M)
    return float(found)


SCHEMA = '{"type": "object", "properties": {"minutes": {"type": "integer"}}, "required": ["minutes"]}'


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": llm_pb2.Sampling(temperature=0.8, seed=3)},
        {"sampling": llm_pb2.Sampling(temperature=0, repetition_penalty=1.1)},
        {"grammar": llm_pb2.Grammar(json_schema=SCHEMA)},
    ],
    ids=["greedy", "seeded", "penalty", "JSON"],
)
def test_the_answer_of_a_real_model_is_known(demo_server: TextGenerationServer, options: dict[str, Any]) -> None:
    prompt = f"### Instruction:\nHow do I cook {len(str(options))} eggs?\n\n### Response:\n"
    asked: dict[str, Any] = {"formatted_prompt": prompt, "max_tokens": 40, "timeout": 60_000, **options}
    with running_service("--endpoint", demo_server.url) as service, service.channel() as channel:
        runner = llm_pb2_grpc.LLMRunnerStub(channel)
        expected = runner.call_model(llm_pb2.ModelRequest(**asked))
        before = used(demo_server)
        known = warm(channel, prompt, answer_tokens=4, cache_key="eggs", **{**asked, "formatted_prompt": ""})
        assert 0 < known.answer_tokens <= 8
        assert known.prompt_tokens == expected.prompt_tokens
        assert runner.call_model(llm_pb2.ModelRequest(**asked)) == expected
        pieces = [each.text for each in runner.stream_model(llm_pb2.ModelRequest(**asked))]
        assert "".join(pieces).strip() == expected.text
        assert used(demo_server) == before + 2 * known.answer_tokens
        runner.call_model(llm_pb2.ModelRequest(**asked | {"max_tokens": 39}))
        assert used(demo_server) == before + 2 * known.answer_tokens


def test_the_endpoint_of_a_prompt_computes_it(
    service: Service, channel: grpc.Channel, servers: list[ModelServer]
) -> None:
    response = warm(channel, LONG, ttl_seconds=60, cache_key="kitchen", adapter_id="cook")
    assert (response.prompt_tokens, response.cached_tokens) == (9, 4)
    (chosen,) = [each for each in servers if each.requests]
    (sent,) = chosen.requests
    body = {"prompt": LONG, "ttl_seconds": 60, "prompt_cache_key": "kitchen", "model": "cook"}
    assert (sent.path, sent.body) == ("/v1/warm", body)
    warm(channel, LONG, cache_key="kitchen", adapter_id="cook", answer_tokens=9, max_tokens=30, stop=["END"])
    parameters = {"max_new_tokens": 30, "adapter_id": "cook", "stop": ["END"], "return_full_text": False}
    body = {"inputs": LONG, "parameters": parameters | {"prompt_cache_key": "kitchen"}, "answer_tokens": 9}
    assert (chosen.requests[-1].path, chosen.requests[-1].body) == ("/v1/warm", body)
    assert 0 < int(sent.headers["x-envoy-expected-rq-timeout-ms"]) <= 11_000
    for each in servers:
        each.raw = None
    with service.runner() as runner:
        assert ask(runner, LONG + "Then what?") == "a fine answer"
    assert chosen.requests[-1].path == "/generate"


def test_a_beginning_that_may_go_anywhere_is_computed_everywhere(
    channel: grpc.Channel, servers: list[ModelServer]
) -> None:
    assert warm(channel, SHORT).prompt_tokens == 9
    assert [[sent.body["prompt"] for sent in each.requests] for each in servers] == [[SHORT]] * 3


def test_a_warm_prompt_in_progress_is_no_load_and_ends_with_its_call(
    service: Service, channel: grpc.Channel, servers: list[ModelServer]
) -> None:
    for each in servers:
        each.raw, each.fault = None, "hang"
    request = llm_pb2.WarmRequest(formatted_prompt=LONG)
    running = llm_pb2_grpc.LLMPrefixCacheStub(channel).Warm.future(request)
    until(lambda: any(each.requests for each in servers))
    (chosen,) = [each for each in servers if each.requests]
    for each in servers:
        each.fault = None
    with service.runner() as runner:
        assert ask(runner, LONG + "Then what?") == "a fine answer"
    assert chosen.requests[-1].path == "/generate"
    running.cancel()
    assert chosen.requests[0].abandoned.wait(SECONDS)


def empty_reason(channel: grpc.Channel, timeout: int = 0) -> str:
    """Returns why the response to a call is empty."""
    request = llm_pb2.WarmRequest(formatted_prompt=LONG, timeout=timeout)
    response, call = llm_pb2_grpc.LLMPrefixCacheStub(channel).Warm.with_call(request)
    assert response == llm_pb2.WarmResponse()
    return str(dict(call.trailing_metadata())["empty-reason"])


def test_without_a_model_in_time_the_response_is_empty(channel: grpc.Channel, servers: list[ModelServer]) -> None:
    for each in servers:
        each.raw_status = "404 Not Found"
    assert empty_reason(channel) == "not_supported"
    for each in servers:
        each.raw, each.fault = None, "hang"
    assert empty_reason(channel, timeout=50) == "deadline"


@pytest.mark.slow
def test_without_an_endpoint_the_response_is_empty() -> None:
    with running_service() as service, service.channel() as channel:
        assert empty_reason(channel) == "no_endpoint"
    with ModelServer() as server, running_service("--endpoint", server.url) as service, service.channel() as channel:
        server.kill()
        assert empty_reason(channel) == "unreachable"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ttl_seconds": -1}, "`ttl_seconds`"),
        ({"ttl_seconds": 3601}, "`ttl_seconds`"),
        ({"timeout": -1}, "`timeout`"),
        ({"cache_key": "k" * 1025}, "`cache_key`"),
        ({"answer_tokens": -1}, "`answer_tokens`"),
        ({"answer_tokens": 513}, "`answer_tokens`"),
        ({"answer_tokens": 1, "sampling": llm_pb2.Sampling(top_p=0.5)}, "`sampling.seed`"),
        ({"answer_tokens": 1, "sampling": llm_pb2.Sampling(temperature=-1)}, "`sampling.temperature`"),
        ({"answer_tokens": 1, "max_tokens": -1}, "`max_tokens`"),
        ({"answer_tokens": 1, "stop": [""]}, "`stop`"),
    ],
)
def test_bad_requests_are_refused_by_the_name_of_the_field(
    changes: dict[str, Any], field: str, channel: grpc.Channel, servers: list[ModelServer]
) -> None:
    with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT") as refused:
        warm(channel, SHORT, **changes)
    assert field in refused.value.details()
    assert not any(each.requests for each in servers)


def test_an_empty_prompt_has_an_empty_response(channel: grpc.Channel, servers: list[ModelServer]) -> None:
    assert warm(channel, "") == llm_pb2.WarmResponse()
    assert not any(each.requests for each in servers)
