"""Grammars of requests to llm_functionalities, down to a real model."""

import json
import re
from collections.abc import Iterator

import grpc
import jsonschema
import pytest

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.conftest import ServerFactory
from tests.integration.llm_functionalities.service import Service, running_service
from tests.integration.structured.test_generate import PROMPT, REGEX, SCHEMA
from tests.servers import TextGenerationServer
from tgi_server import demo_model

LONG = 30_000  # milliseconds
DECISION = llm_pb2.ExecutionSearchRequest(user_question="I want pizza", timeout=LONG)


@pytest.fixture(scope="module")
def channel(demo_server: TextGenerationServer) -> Iterator[grpc.Channel]:
    with running_service("--endpoint", demo_server.url) as service, service.channel() as channel:
        yield channel


def request(**grammar: str) -> llm_pb2.ModelRequest:
    return llm_pb2.ModelRequest(
        formatted_prompt=PROMPT, max_tokens=200, timeout=LONG, grammar=llm_pb2.Grammar(**grammar)
    )


def test_call_model(channel: grpc.Channel) -> None:
    runner = llm_pb2_grpc.LLMRunnerStub(channel)
    jsonschema.validate(json.loads(runner.call_model(request(json_schema=json.dumps(SCHEMA))).text), SCHEMA)
    assert re.fullmatch(REGEX, runner.call_model(request(regex=REGEX)).text)
    null = runner.call_model(request(json_schema='{"const": null}'))
    assert null.text == "null"


def test_batch_call_model(channel: grpc.Channel) -> None:
    batch = llm_pb2.ModelBatchRequest(
        formatted_prompts=[f"{i}. {PROMPT}" for i in range(4)],
        max_tokens=100,
        timeout=LONG,
        grammar=llm_pb2.Grammar(regex=REGEX),
    )
    texts = llm_pb2_grpc.LLMRunnerStub(channel).batch_call_model(batch).text
    assert len(texts) == 4
    assert all(re.fullmatch(REGEX, text) for text in texts)


def test_stream_model(channel: grpc.Channel) -> None:
    runner = llm_pb2_grpc.LLMRunnerStub(channel)
    for asked in (request(json_schema=json.dumps(SCHEMA)), request(regex=REGEX)):
        pieces = [response.text for response in runner.stream_model(asked)]
        assert len(pieces) > 3
        assert "".join(pieces) == runner.call_model(asked).text


def test_a_grammar_that_cannot_be_compiled(channel: grpc.Channel) -> None:
    response, call = llm_pb2_grpc.LLMRunnerStub(channel).call_model.with_call(request(json_schema='{"not": {}}'))
    assert response.text == ""
    assert dict(call.trailing_metadata())["empty-reason"] == "rejected"


def test_workflows(channel: grpc.Channel) -> None:
    decision = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel).generate_decision(DECISION)
    assert decision.intent_classification in (
        "recommend_new_search",
        "continue_current_task",
        "ask_clarifying_question",
    )


@pytest.mark.slow
def test_workflows_go_on_without_grammars(server: ServerFactory) -> None:
    model = server(f"--model-id={demo_model.PATH}", "--dtype=float32", "--disable-grammar-support").wait_until_ready()
    service: Service
    with running_service("--endpoint", model.url) as service, service.channel() as channel:
        stub = llm_pb2_grpc.LLMExecutionSearchManagerStub(channel)
        reasons = [dict(stub.generate_decision.with_call(DECISION)[1].trailing_metadata()) for _ in range(3)]
        assert all(each.get("empty-reason") in (None, "unusable") for each in reasons)
        (line,) = (line for line in service.log if "does not support grammars" in line)
        assert "--disable-grammar-support" in line
