"""The running stack after its model server was killed: calls come back empty, and at once."""

import os
import time

import grpc
import pytest

from shared.stubs import llm_pb2
from shared.stubs.llm_pb2_grpc import LLMRunnerStub

URL = os.environ.get("LLM_FUNCTIONALITIES_URL")


@pytest.mark.slow
@pytest.mark.skipif(not URL, reason="LLM_FUNCTIONALITIES_URL does not say where the stack runs")
def test_away_a_call_comes_back_empty_within_its_time() -> None:
    with grpc.insecure_channel(str(URL)) as channel:
        runner = LLMRunnerStub(channel)
        started = time.monotonic()
        reply = runner.call_model(llm_pb2.ModelRequest(formatted_prompt="Hello", timeout=3_000), timeout=20)
        assert reply.text == ""
        # Three seconds, and what a busy machine adds.
        assert time.monotonic() - started < 8
