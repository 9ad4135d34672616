"""A real server of three real models in memory for one and a half: requests, sleep, a killed shard, mistakes."""

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import ServerFactory
from tests.servers import READY_SECONDS, TextGenerationServer
from tests.tiny_encoders import make_embedder
from tgi_server import demo_model

MIB = 1 << 20


def completed(server: TextGenerationServer, model: str, prompt: str = "How do I cook rice?") -> httpx.Response:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)


def text(server: TextGenerationServer, model: str, prompt: str = "How do I cook rice?") -> str:
    response = completed(server, model, prompt)
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["text"]
    return found


def states(server: TextGenerationServer) -> dict[str, str]:
    listed = httpx.get(f"{server.url}/v1/models", timeout=30).json()["data"]
    return {each["id"]: each["state"] for each in listed}


def shard(server: TextGenerationServer, name: str) -> psutil.Process:
    children = psutil.Process(server.process.pid).children()
    (found,) = (each for each in children if f"--log-name={name}-shard-0" in each.cmdline())
    return found


@pytest.fixture
def table(tmp_path: Path, llama_folder: Path) -> Path:
    embedder = make_embedder("bert", tmp_path / "embedder")
    file = tmp_path / "models.toml"
    file.write_text(f"""
    [[model]]
    id = "{demo_model.PATH}"
    name = "demo"
    cpu-memory = "24MiB"

    [[model]]
    id = "{llama_folder}"
    name = "llama"
    cpu-memory = "24MiB"

    [[model]]
    id = "{embedder}"
    name = "embedder"
    """)
    return file


def flags(table: Path) -> tuple[str, ...]:
    folder = table.parent / "packed"
    cache = (f"--packed-weights-cache={folder}", f"--prefix-cache-disk=1GiB:{folder}")
    return (f"--models={table}", "--models-memory=48MiB", "--dtype=float32", *cache)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_models_in_memory_for_one_and_a_half(server: ServerFactory, table: Path) -> None:
    running = server(*flags(table)).wait_until_ready()
    expected = {name: text(running, name) for name in ("demo", "llama")}
    assert sorted(states(running).values()) != ["awake", "awake", "awake"]
    chance = random.Random(0)

    def ask(number: int) -> None:
        time.sleep(chance.uniform(0, 0.2))
        name = chance.choice(("demo", "llama", "embedder"))
        if name == "embedder":
            found = httpx.post(f"{running.url}/v1/embeddings", json={"input": "rice", "model": name}, timeout=300)
            assert found.status_code == 200, found.text
        else:
            assert text(running, name) == expected[name]  # the same bits after every sleep

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(80)))
    metrics = httpx.get(f"{running.url}/metrics").text
    slept = [line for line in metrics.splitlines() if line.startswith("tgi_sleep_duration_count{")]
    assert sum(float(line.split()[1]) for line in slept) >= 3

    # A shard that is killed is an error of its own model only, and is started again by a later request.
    os.kill(shard(running, "llama").pid, signal.SIGKILL)
    running.wait_until(lambda: states(running)["llama"] == "failed")
    refused = completed(running, "llama")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
    assert "was killed by SIGKILL" in refused.json()["error"]["message"]
    assert text(running, "demo") == expected["demo"]
    running.wait_until(lambda: completed(running, "llama").status_code == 200, READY_SECONDS)
    assert text(running, "llama") == expected["llama"]

    assert running.stop() == 0
    assert "stopped" in running.lines()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_cannot_be_loaded_leaves_the_others(server: ServerFactory, table: Path) -> None:
    table.write_text(table.read_text().replace('name = "llama"', 'name = "llama"\nmax-total-tokens = 1000000'))
    running = server(f"--models={table}", "--dtype=float32").wait_until_ready()
    running.wait_until(lambda: states(running)["llama"] == "failed", READY_SECONDS)
    refused = completed(running, "llama")
    assert refused.status_code == 503
    assert "--max-total-tokens is 1000000" in refused.json()["error"]["message"]
    assert text(running, "demo")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("cpu-memory", "cpu-memorie"), "model 1: `cpu-memorie` is unknown; did you mean"),
        pytest.param(
            lambda text: text.replace("embedder", "nothing", 1), "there is no model folder", marks=pytest.mark.slow
        ),
        pytest.param(lambda text: text.replace("24MiB", "1TiB"), "--cpu-memory is 1024.0 GiB", marks=pytest.mark.slow),
    ],
)
def test_mistakes_end_the_start_with_one_line(
    server: ServerFactory, table: Path, change: Callable[[str], str], told: str
) -> None:
    table.write_text(change(table.read_text()))
    wrong = server(f"--models={table}")
    assert wrong.wait(60) in (1, 2)
    lines: Any = [line for line in wrong.lines().splitlines() if "INFO" not in line]
    assert told in lines[-1]
