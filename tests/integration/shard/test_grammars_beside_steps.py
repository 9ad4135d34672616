"""Grammars are compiled while a step computes, and requests for them are heard."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from queue import Queue

import grpc
import pytest

from shared.processes import die_with_parent
from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import GrammarServiceStub, TextGenerationServiceStub
from tgi_server import demo_model

# The shard as it is, but for a step that takes until the test is over.
SHARD_WITH_AN_ENDLESS_STEP = """
import time
from tgi_server.engine import Engine
from tgi_server.shard.cli import main

step = Engine.step

def endless(engine, batch_id, joining=(), *arguments, **options):
    if joining:
        return step(engine, batch_id, joining, *arguments, **options)
    print("decoding", flush=True)
    time.sleep(600)

Engine.step = endless
main()
"""


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address, and its process."""
    command = [sys.executable, "-c", SHARD_WITH_AN_ENDLESS_STEP, "serve", str(demo_model.PATH)]
    process = subprocess.Popen(
        [*command, f"--uds-path={tmp_path / 'shard'}"], stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent()
    )
    try:
        yield f"unix://{tmp_path / 'shard-0'}", process
    finally:
        process.kill()
        process.wait()


def compile_request(regex: str) -> pb.CompileRequest:
    return pb.CompileRequest(grammar=pb.Grammar(type=pb.Grammar.REGEX, value=regex))


@pytest.mark.slow
def test_a_grammar_is_compiled_while_a_step_computes(shard) -> None:
    url, process = shard
    calls: Queue[pb.Call | None] = Queue()
    with grpc.insecure_channel(url) as channel:
        stub = TextGenerationServiceStub(channel)
        places = stub.ServiceDiscovery(pb.ServiceDiscoveryRequest(), timeout=60, wait_for_ready=True)
        assert list(places.urls) == [url]
        stub.Warmup(pb.WarmupRequest(max_batch_size=2, max_prefill_tokens=64, max_total_tokens=64), timeout=60)
        answers = stub.Run(iter(calls.get, None))
        request = pb.Request(id=1, input_ids=[1, 2], max_new_tokens=9, ignore_eos=True, block_ids=[1])
        calls.put(
            pb.Call(
                prefill=pb.PrefillRequest(batch_id=1, requests=[request], chunks=[pb.Chunk(request_id=1, tokens=2)])
            )
        )
        assert len(next(answers).step.generations) == 1
        calls.put(pb.Call(decode=pb.DecodeRequest(batch_id=1)))
        assert process.stdout.readline() == "decoding\n"
        with grpc.insecure_channel(places.grammar_urls[0]) as grammar_channel:
            grammars = GrammarServiceStub(grammar_channel)
            for regex in ("[a-z]{3,9}", "[a-z]{3,9}", "[0-9]+"):
                assert grammars.Compile(compile_request(regex), timeout=60).error == ""
            assert grammars.Compile(compile_request("(a"), timeout=60).error
        calls.put(None)
