"""The running stack, through its gRPC service, at LLM_FUNCTIONALITIES_URL: `docker compose run tester`."""

import os
from collections.abc import Iterator

import grpc
import pytest

from shared.stubs import llm_pb2
from shared.stubs.llm_pb2_grpc import LLMRunnerStub

URL = os.environ.get("LLM_FUNCTIONALITIES_URL")
PROMPT = "### Instruction:\nHow long do I boil an egg?\n\n### Response:\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not URL, reason="LLM_FUNCTIONALITIES_URL does not say where the stack runs"),
]


@pytest.fixture
def runner() -> Iterator[LLMRunnerStub]:
    with grpc.insecure_channel(str(URL)) as channel:
        yield LLMRunnerStub(channel)


def test_llm_answers_a_prompt(runner) -> None:
    reply = runner.call_model(llm_pb2.ModelRequest(formatted_prompt=PROMPT, max_tokens=40, timeout=20_000), timeout=30)
    assert reply.text
    assert PROMPT not in reply.text


def test_llm_answers_a_batch_in_order(runner) -> None:
    prompts = [PROMPT, "### Instruction:\nSay hello.\n\n### Response:\n", PROMPT]
    request = llm_pb2.ModelBatchRequest(formatted_prompts=prompts, max_tokens=20, timeout=20_000)
    reply = runner.batch_call_model(request, timeout=30)
    assert len(reply.text) == 3
    assert all(reply.text)
    assert reply.text[0] == reply.text[2] != reply.text[1]


def test_llm_summarises(runner) -> None:
    reply = runner.generate_summary(llm_pb2.TGISummaryRequest(input_text="Boil the eggs for ten minutes."), timeout=30)
    assert reply.summary_text
