"""One model over two processes, and what becomes of the server when one of them dies."""

import os
import re
import time
from pathlib import Path

import httpx
import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import ServerFactory
from tests.integration.launcher.processes import Stream, alive, shard_of, socket_folder
from tests.servers import TextGenerationServer
from tests.timing import until
from tgi_server import demo_model

FLAGS = (f"--model-id={demo_model.PATH}", "--dtype=float32", "--num-shard=2")
PROMPTS = (
    "### Instruction:\nHow long do I boil an egg?\n\n### Response:\n",
    "### Instruction:\nHow do I sharpen a chisel?\n\n### Response:\n",
)
END_SECONDS = 10

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("speculate", "flags"),
    [(0, ()), (3, ("--speculate=3",)), (4, (f"--speculative-model={demo_model.PATH}",))],
)
def test_two_shards_write_what_one_writes(
    server: ServerFactory, demo_server: TextGenerationServer, speculate: int, flags: tuple[str, ...]
) -> None:
    running = server(*FLAGS, *flags).wait_until_ready()
    assert httpx.get(f"{running.url}/info").json()["speculate"] == speculate
    for prompt in (*PROMPTS, PROMPTS[0]):
        expected = demo_server.generate(prompt, max_new_tokens=40, details=True, top_n_tokens=1)
        answer = running.generate(prompt, max_new_tokens=40, details=True, top_n_tokens=1)
        assert answer["generated_text"] == expected["generated_text"]
        assert ids(answer) == ids(expected)
    digits = running.generate(PROMPTS[0], max_new_tokens=40, grammar={"type": "regex", "value": "[0-9]{3}"})
    assert re.fullmatch("[0-9]{3}", digits["generated_text"])
    children = psutil.Process(running.process.pid).children(recursive=True)
    folder = socket_folder(shard_of(running, 0))
    assert folder == socket_folder(shard_of(running, 1))
    assert sorted(path.name for path in folder.iterdir()) == [
        "shard-0",
        "shard-0-grammars",
        "shard-0-router",
        "shard-1",
        "shard-1-grammars",
    ]
    assert running.stop() == 0
    until(lambda: not alive(children))
    assert not folder.exists()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_each_shard_stays_on_the_cores_of_its_node(server: ServerFactory, demo_server: TextGenerationServer) -> None:
    first, second, *_ = sorted(os.sched_getaffinity(0))
    running = server(*FLAGS, f"--numa={first};{second}").wait_until_ready()
    for rank, core in enumerate((first, second)):
        threads = Path(f"/proc/{shard_of(running, rank).pid}/task").glob("*/status")
        lists = {re.findall(r"Cpus_allowed_list:\s*(\S+)", status.read_text())[0] for status in threads}
        assert lists == {str(core)}
    for prompt in PROMPTS:
        expected = demo_server.generate(prompt, max_new_tokens=40, details=True)
        assert ids(running.generate(prompt, max_new_tokens=40, details=True)) == ids(expected)
    assert running.stop() == 0


def ids(answer: dict[str, dict[str, list[dict[str, int]]]]) -> list[int]:
    return [token["id"] for token in answer["details"]["tokens"]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_is_killed_while_generating_is_named(server: ServerFactory, rank: int) -> None:
    running = server(*FLAGS).wait_until_ready()
    stream = Stream(running, tokens=400)
    last = kill_and_wait(running, rank)
    assert "error" in stream.finish()
    assert f"shard-{rank} was killed by SIGKILL" in last


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_that_is_frozen_is_named_and_comes_back(server: ServerFactory, rank: int) -> None:
    running = server(*FLAGS).wait_until_ready()
    shard = shard_of(running, rank)
    stream = Stream(running, tokens=400)
    shard.suspend()
    response = httpx.get(f"{running.url}/health", timeout=30)
    assert response.status_code == 503
    assert f"shard {rank} does not respond" in response.json()["error"]
    shard.resume()
    running.wait_until(running.is_healthy)
    stream.finish()


def test_a_shard_that_is_killed_while_idle_is_named(server: ServerFactory) -> None:
    assert "shard-1 was killed by SIGKILL" in kill_and_wait(server(*FLAGS).wait_until_ready(), 1)


@pytest.mark.parametrize(
    "moment", ["launcher: settings", "waiting for 2 shards", "shard 1 of 2 is connected to the others"]
)
def test_a_shard_that_is_killed_while_loading_is_named(server: ServerFactory, moment: str) -> None:
    running = server(*FLAGS)
    running.wait_until(lambda: moment in running.lines() and len(psutil.Process(running.process.pid).children()) == 3)
    assert "shard-1 was killed by SIGKILL" in kill_and_wait(running, 1)


def test_a_shard_that_cannot_load_says_why(server: ServerFactory, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in demo_model.PATH.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(demo_model.PATH / "model.safetensors")
    del tensors[missing := next(name for name in tensors if name.endswith("norm.weight"))]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    running = server(f"--model-id={broken}", "--num-shard=2")
    assert running.wait(60) == 1
    last = running.lines().splitlines()[-1]
    assert "ended with exit code 1: " in last
    assert missing in last


def kill_and_wait(running: TextGenerationServer, rank: int) -> str:
    """The launcher's last line, once it has ended in time and left nothing."""
    children = psutil.Process(running.process.pid).children(recursive=True)
    folder = socket_folder(shard_of(running, rank))
    shard_of(running, rank).kill()
    start = time.monotonic()
    assert running.wait() == 1
    assert time.monotonic() - start < END_SECONDS
    until(lambda: not alive(children))
    assert not folder.exists()
    return running.lines().splitlines()[-1]
