"""Servers that are started for a measurement, from their command to their end."""

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.api import APIS
from benchmarks.connection import Connection, ServerUnavailable
from benchmarks.load import Target, run_workload
from benchmarks.servers import OURS, PEERS, ServerCommand, ServerDidNotStart, running
from benchmarks.workloads import Workload
from tests.timing import eventually


@pytest.mark.slow
async def test_our_server_replies_and_leaves_nothing_behind(tiny_model: Path, tmp_path: Path) -> None:
    workload = Workload("X", users=5, words=3, new_tokens=6, repeat=2)
    before = set(psutil.Process().children(recursive=True))
    command = OURS.command.replace("bfloat16", "float32")
    ours = replace(OURS, command=command, environment={"OMP_NUM_THREADS": "1"})
    async with running(ours, tiny_model, tmp_path / "logs" / "ours.log", limit=100) as server:
        for api in APIS.values():
            for stream in (False, True):
                load = replace(workload, stream=stream)
                outcome = await run_workload(Target(server.url, api("tiny")), load, warm_up=False)
                assert outcome.failures == []
                assert [record.new_tokens for record in outcome.records] == [6] * 10
    assert not [child for child in psutil.Process().children(recursive=True) if child not in before]
    with pytest.raises(ServerUnavailable):
        await Connection(server.url).request("GET", "/health")


async def test_a_server_that_ends_at_once_is_told_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "peer.log"
    command = ServerCommand("peer", """python -c 'import sys; sys.exit("no such port: " + sys.argv[1])' {port}""")
    with pytest.raises(ServerDidNotStart, match=r"peer ended with status 1: no such port: \d+ \(see .*/peer\.log\)"):
        async with running(command, tmp_path, log, limit=60):
            pass


async def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ServerDidNotStart, match=r"peer cannot be started: .*no-such-server"):
        async with running(ServerCommand("peer", "no-such-server {model}"), tmp_path, tmp_path / "log", limit=1):
            pass


async def test_a_server_that_never_gets_healthy_is_given_up_and_stopped(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ServerDidNotStart, match=r"peer did not get healthy within 0\.2 s"):
        async with running(ServerCommand("peer", "sleep 60"), tmp_path, tmp_path / "log", limit=0.2):
            pass
    with contextlib.suppress(psutil.NoSuchProcess):
        assert set(psutil.Process().children(recursive=True)) <= before


async def test_sigterm_ends_the_server_as_well(tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))

    async def measure() -> None:
        async with running(ServerCommand("peer", "sleep 60"), tmp_path, tmp_path / "log", limit=60):
            pass

    task = asyncio.create_task(measure())
    await eventually(lambda: bool(set(psutil.Process().children(recursive=True)) - before))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [child for child in psutil.Process().children(recursive=True) if child not in before]


@pytest.mark.parametrize("wrong", ["{modle}", "{model.nmae}"])
def test_a_wrong_placeholder_is_told(tmp_path: Path, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"placeholders are \{model\}, \{gguf\}, \{port\} and \{length\}"):
        ServerCommand("peer", f"serve {wrong}").arguments(tmp_path, 1)


def test_a_command_may_hold_the_name_of_the_model_alone(tmp_path: Path) -> None:
    command = ServerCommand("peer", "serve /elsewhere/{model.name}-int8 {port}")
    assert command.arguments(tmp_path / "opt", 8090) == ["serve", "/elsewhere/opt-int8", "8090"]


def test_a_server_is_told_of_the_adapters_beside_the_model() -> None:
    command = replace(OURS, command="serve {model}")
    assert command.arguments(Path("/models/opt"), 80, adapters=2) == [
        *("serve", "/models/opt", "--lora-adapters"),
        "adapter-0=/models/opt-adapters/adapter-0,adapter-1=/models/opt-adapters/adapter-1",
    ]


@pytest.mark.parametrize(
    ("peer", "beside"),
    [("llama.cpp", "-Q4_K_M.gguf"), ("llama-server", "-Q4_K_M.gguf"), ("openvino", "-openvino")],
)
def test_peers_of_4_bits_read_what_lies_beside_the_model(peer: str, beside: str, tmp_path: Path) -> None:
    arguments = PEERS[peer].arguments(tmp_path / "llama-360m", 8090)
    assert f"{tmp_path}/llama-360m{beside}" in arguments
    assert "8090" in arguments


@pytest.mark.parametrize("peer", ["llama.cpp", "llama-server"])
def test_a_gguf_file_is_read_by_both_sides(peer: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    assert str(file) in PEERS[peer].arguments(file, 8090)
    assert str(file) in OURS.arguments(file, 8090)
