"""Calls that name several models: the largest one that will be in time answers, the smallest one is the fallback."""

import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.conftest import FreePort, ServerFactory
from tests.fakes.model_server import ModelServer
from tests.integration.launcher.test_several_models import shard
from tests.integration.llm_functionalities.service import Service, running_service
from tests.integration.llm_functionalities.test_failover import Replica
from tests.timing import SECONDS, until
from tgi_server import demo_model

BOTH = (("models", "large, small"),)
GENEROUS_MS = 60_000


class Models:
    """A service in front of a plain model server, a large and a small model of one more server each."""

    def __init__(self, plain: ModelServer, large: ModelServer, small: ModelServer) -> None:
        self.plain, self.large, self.small = plain, large, small
        for name, server in vars(self).items():
            server.answer, server.sick = f"the {name} one", False

    def flags(self, *flags: str) -> tuple[str, ...]:
        models = f"large={self.large.url}#big/model 1,small={self.small.url}"
        return "--endpoint", self.plain.url, "--ladder-models", models, *flags


@pytest.fixture
def models() -> Iterator[Models]:
    with ModelServer() as plain, ModelServer() as large, ModelServer() as small:
        yield Models(plain, large, small)


@pytest.fixture
def service(models: Models) -> Iterator[Service]:
    with running_service(*models.flags("--metrics-port", "0")) as service:
        yield service


def request(timeout_ms: int = GENEROUS_MS) -> llm_pb2.ModelRequest:
    return llm_pb2.ModelRequest(formatted_prompt="hello", max_tokens=20, timeout=timeout_ms)


def asked(
    runner: llm_pb2_grpc.LLMRunnerStub, metadata: tuple[tuple[str, str], ...] = BOTH, timeout_ms: int = GENEROUS_MS
) -> tuple[str, str]:
    """Returns the text of a call, and the model that the trailing metadata name."""
    response, call = runner.call_model.with_call(request(timeout_ms), metadata=metadata)
    return response.text, dict(call.trailing_metadata()).get("model", "")


def streamed(runner: llm_pb2_grpc.LLMRunnerStub, timeout_ms: int = GENEROUS_MS) -> tuple[str, str]:
    stream = runner.stream_model(request(timeout_ms), metadata=BOTH)
    text = "".join(piece.text for piece in stream)
    return text, dict(stream.trailing_metadata()).get("model", "")


def metric(service: Service, line: str) -> float:
    port = next(text.rpartition(":")[2].split("/")[0] for text in service.log if "metrics on" in text)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as response:
        lines = response.read().decode().splitlines()
    return next((float(each.removeprefix(line)) for each in lines if each.startswith(line)), 0.0)


def test_a_call_that_names_no_model_is_answered_as_if_there_were_none(service: Service, models: Models) -> None:
    with service.runner() as runner:
        assert asked(runner, ()) == ("the plain one", "")
        assert asked(runner) == ("the large one", "large")
        assert asked(runner, (("models", "small"),)) == ("the small one", "small")
    assert [each.query for each in models.large.requests] == ["model=big%2Fmodel%201"]
    assert [each.query for each in models.plain.requests + models.small.requests] == ["", ""]
    assert metric(service, 'llm_functionalities_ladder_requests_total{model="large",reason="chosen"} ') == 1
    assert metric(service, 'llm_functionalities_ladder_answers_total{model="small"} ') == 1


def test_the_default_ladder_is_that_of_calls_that_name_no_model(models: Models) -> None:
    with running_service(*models.flags("--ladder", "large,small")) as service, service.runner() as runner:
        assert asked(runner, ()) == ("the large one", "large")
        batch = llm_pb2.ModelBatchRequest(formatted_prompts=["one", "two"], timeout=GENEROUS_MS)
        models.large.answer = lambda prompt: f"{prompt} by the large one"
        response, call = runner.batch_call_model.with_call(batch)
        assert list(response.text) == ["one by the large one", "two by the large one"]
        assert dict(call.trailing_metadata())["model"] == "large"


@pytest.mark.parametrize("fault", [500, 503, 404, "reset", "garbage"])
def test_the_small_model_answers_if_the_large_one_fails(service: Service, models: Models, fault: Any) -> None:
    models.large.fault = fault
    with service.runner() as runner:
        assert asked(runner) == ("the small one", "small")
        assert streamed(runner) == ("the small one", "small")
    assert metric(service, 'llm_functionalities_ladder_requests_total{model="small",reason="fallback"} ') == 2


def test_the_small_model_answers_if_the_large_one_is_gone_and_the_large_one_if_the_small_one_is(
    service: Service, models: Models
) -> None:
    models.large.kill()
    with service.runner() as runner:
        assert asked(runner) == ("the small one", "small")
        models.large.start()
        models.small.kill()
        until(lambda: asked(runner) == ("the large one", "large"))
        models.large.delay = 0.2
        for _ in range(8):
            assert asked(runner) == ("the large one", "large")
        response, call = runner.call_model.with_call(request(GENEROUS_MS), metadata=(("models", "small"),))
        assert response.text == ""
        assert dict(call.trailing_metadata())["empty-reason"] in ("unreachable", "circuit_open")


def test_a_request_at_fault_is_refused_once(service: Service, models: Models) -> None:
    models.large.fault = 422
    with service.runner() as runner:
        _, call = runner.call_model.with_call(request(), metadata=BOTH)
    assert dict(call.trailing_metadata())["empty-reason"] == "rejected"
    assert not models.small.requests


@pytest.mark.parametrize("ask", [asked, streamed])
def test_the_small_model_is_asked_in_time_if_the_large_one_has_not_begun(
    service: Service, models: Models, ask: Any
) -> None:
    models.large.fault = "hang"
    with service.runner() as runner:
        assert ask(runner, timeout_ms=3000) == ("the small one", "small")
    assert models.large.requests[0].abandoned.wait(SECONDS)
    assert metric(service, 'llm_functionalities_ladder_requests_total{model="small",reason="late"} ') == 1


def test_a_stream_that_has_begun_stays_with_its_model(service: Service, models: Models) -> None:
    models.large.answer, models.large.delay = " ".join(["word"] * 12), 0.2
    with service.runner() as runner:
        text, model = streamed(runner, timeout_ms=1500)
    assert model == "large"
    assert text.startswith("word")
    assert not models.small.requests


def test_a_model_that_was_too_slow_is_not_asked_for_what_it_cannot_do_in_time(service: Service, models: Models) -> None:
    models.large.delay = 1.0
    with service.runner() as runner:
        callers = [threading.Thread(target=asked, args=(runner,)) for _ in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        asked_before = len(models.large.requests)
        assert asked_before == 3
        begun = time.monotonic()
        assert asked(runner, timeout_ms=900) == ("the small one", "small")
        assert time.monotonic() - begun < 0.9
        assert len(models.large.requests) == asked_before
        assert asked(runner) == ("the large one", "large")


def test_decisions_and_warm_prompts_take_the_ladder_too(service: Service, models: Models) -> None:
    models.small.decision = {"type": "predicate", "probability": 0.75, "label_mass": 1.0}
    asked = llm_pb2.DecisionRequest(
        input="text", questions=[llm_pb2.DecisionQuestion(instructions="Is it?")], timeout=GENEROUS_MS
    )
    with service.channel() as channel:
        response, call = llm_pb2_grpc.LLMDecisionsStub(channel).Decide.with_call(asked, metadata=BOTH)
        assert response.answers[0].probabilities == [0.75]
        assert dict(call.trailing_metadata())["model"] == "small"
        for server in (models.large, models.small):
            server.raw = b'{"prompt_tokens": 3, "cached_tokens": 0, "answer_tokens": 0}'
        warm = llm_pb2.WarmRequest(formatted_prompt="hello", timeout=GENEROUS_MS)
        assert llm_pb2_grpc.LLMPrefixCacheStub(channel).Warm(warm, metadata=BOTH).prompt_tokens == 3
    assert [each.path for each in models.large.requests + models.small.requests] == ["/v1/warm"] * 2


@pytest.mark.parametrize(
    ("names", "complaint"),
    [
        ("large,medium", "'medium', which is not a model; those of this service are large, small"),
        ("small,small", "name a model twice"),
    ],
)
def test_a_bad_ladder_is_refused(service: Service, models: Models, names: str, complaint: str) -> None:
    with service.runner() as runner:
        with pytest.raises(grpc.RpcError, match=complaint) as refused:
            asked(runner, (("models", names),))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert asked(runner) == ("the large one", "large")


def test_vectors_are_those_of_one_model(service: Service, models: Models) -> None:
    with service.channel() as channel:
        embeddings = llm_pb2_grpc.LLMEmbeddingsStub(channel)
        with pytest.raises(grpc.RpcError, match="cannot be compared"):
            embeddings.Embed(llm_pb2.EmbedRequest(texts=["one"]), metadata=BOTH)
        models.small.raw = b'{"data": [{"embedding": [1.0, 0.0]}]}'
        response = embeddings.Embed(llm_pb2.EmbedRequest(texts=["one"]), metadata=(("models", "small"),))
        assert list(response.embeddings[0].values) == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_500_calls_in_bursts_to_two_servers_each_go_to_the_largest_that_can_be_in_time(
    free_port: FreePort, tmp_path: Path
) -> None:
    """An answer takes the large model 4 s at least. Half of the calls have 3 s, the others 30 s."""
    tokens, tight_ms, generous_ms = 20, 3000, 30_000
    folders = [tmp_path / name for name in ("large", "small")]
    for folder in folders:
        folder.mkdir()
    replicas = [Replica(folder, free_port(), step) for folder, step in zip(folders, (0.2, 0.002), strict=True)]
    answered: Counter[tuple[str, str]] = Counter()
    try:
        for replica in replicas:
            replica.start("--max-batch-size=64").until_ready()
        large, small = (replica.url for replica in replicas)
        with running_service("--ladder-models", f"large={large},small={small}") as service, service.runner() as runner:

            def caller(number: int) -> None:
                kind, timeout_ms = ("tight", tight_ms) if number % 2 else ("generous", generous_ms)
                request = llm_pb2.ModelRequest(formatted_prompt=f"Call {number}", max_tokens=tokens, timeout=timeout_ms)
                response, call = runner.call_model.with_call(request, metadata=BOTH)
                answered[kind, dict(call.trailing_metadata())["model"] if response.text else ""] += 1

            with ThreadPoolExecutor(3) as callers:  # the first calls, which the large model's pace is measured by
                list(callers.map(caller, range(0, 12, 2)))
            answered.clear()
            with ThreadPoolExecutor(48) as callers:
                list(callers.map(caller, range(500)))
    finally:
        for replica in replicas:
            replica.end()
    assert answered["tight", "large"] == 0
    assert answered["tight", "small"] >= 0.95 * 250, answered
    assert answered["generous", "large"] >= 0.95 * 250, answered
    assert answered["generous", ""] == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_models_of_one_server(server: ServerFactory, llama_folder: Path) -> None:
    models = f"--models=demo={demo_model.PATH},llama={llama_folder}"
    running = server(models, "--models-memory=256MiB", "--dtype=float32").wait_until_ready()
    flags = ("--ladder-models", f"large={running.url}#demo,small={running.url}#llama")
    with running_service(*flags) as service, service.runner() as runner:
        expected = {}
        for name, model in (("large", "demo"), ("small", "llama")):
            text, answered_by = asked(runner, (("models", name),))
            assert answered_by == name
            body = {"inputs": "hello", "parameters": {"max_new_tokens": 20}}
            direct = httpx.post(f"{running.url}/generate?model={model}", json=body, timeout=60).json()
            assert text == direct["generated_text"].strip()
            expected[name] = text
        assert expected["large"] != expected["small"]
        assert asked(runner) == (expected["large"], "large")
        assert streamed(runner)[1] == "large"
        os.kill(shard(running, "demo").pid, signal.SIGKILL)
        until(lambda: asked(runner) == (expected["small"], "small"))
