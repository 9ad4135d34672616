"""Cached prefixes outlive the server: a real one is killed, and started again."""

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import ServerFactory
from tests.servers import TextGenerationServer
from tests.tiny_models import make_llama

TEXT = "the quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak. " * 20
BLOCK = 32  # tokens
# Kills of the slow test at random moments.
KILLS = int(os.environ.get("OATMILL_KILLS", "8"))
Start = Callable[..., TextGenerationServer]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def start(server: ServerFactory, model: Path, tmp_path: Path) -> Start:
    """Starts a server of the model with prefixes on disk."""

    def begin(*flags: str, disk: str | None = None, folder: Path = model) -> TextGenerationServer:
        disk = disk or f"50MB:{tmp_path / 'disk'}"
        flags = f"--model-id={folder}", "--dtype=float32", f"--prefix-cache-disk={disk}", *flags
        return server(*flags).wait_until_ready()

    return begin


def answer(server: TextGenerationServer, text: str = TEXT, key: str | None = None, **fields: Any) -> dict[str, Any]:
    """Returns tokens and log-probabilities of an answer, and how many tokens of the prompt were cached."""
    body = {"prompt": text, "max_tokens": 12, "logprobs": 3, "ignore_eos": True, "temperature": 0} | fields
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    response.raise_for_status()
    found = response.json()
    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {"answer": found["choices"][0]["logprobs"], "text": found["choices"][0]["text"], "cached": cached}


def metric(server: TextGenerationServer, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def stored(server: TextGenerationServer, tokens: int = 1) -> None:
    server.wait_until(lambda: metric(server, "tgi_prefix_disk_stored_tokens_total") >= tokens)


def kill(server: TextGenerationServer) -> None:
    """Kills all processes of a server at once."""
    processes = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    for process in processes:
        process.suspend()
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # children end with their parents
            process.kill()
    server.process.wait()


def test_prompts_outlive_a_killed_server_and_keys_share_nothing(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    first = start(f"--api-key-file={keys}")
    fresh = answer(first, key="first-key", cache_salt="a")
    assert fresh["cached"] == 0
    assert answer(first, key="second-key")["cached"] == 0
    stored(first, 800)
    kill(first)
    second = start(f"--api-key-file={keys}")
    assert forgotten(second, "second-key") == 0
    again = answer(second, key="first-key", cache_salt="a")
    assert (again["answer"], again["text"]) == (fresh["answer"], fresh["text"])
    assert again["cached"] >= 256
    assert metric(second, "tgi_prefix_disk_hit_tokens_total") >= 256
    assert answer(second, key="second-key", cache_salt="a")["cached"] == 0
    assert answer(second, key="second-key")["cached"] >= 256
    assert forgotten(second, "first-key") > 0
    assert answer(second, key="first-key", cache_salt="a")["cached"] == 0
    folder = tmp_path / "disk" / "oatmill-prefixes"
    assert not [file for file in folder.iterdir() if b"-key" in file.read_bytes()]


def forgotten(server: TextGenerationServer, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    response = httpx.post(f"{server.url}/v1/forget", json={"cache_salt": "a"}, headers=headers, timeout=30)
    number: int = response.json()["files"]
    return number


@pytest.mark.slow
def test_several_shards_have_files_of_their_own(start: Start, tmp_path: Path) -> None:
    first = start("--num-shard=2")
    fresh = answer(first, cache_salt="a")
    stored(first, 384)
    kill(first)
    ranks = {file.suffix for file in (tmp_path / "disk" / "oatmill-prefixes").glob("*.blocks.*")}
    assert ranks == {".0", ".1"}
    second = start("--num-shard=2")
    again = answer(second, cache_salt="a")
    assert (again["answer"], again["text"]) == (fresh["answer"], fresh["text"])
    assert again["cached"] >= 384


def _ask_until_killed(server: TextGenerationServer, rng: random.Random, expected: dict[str, Any]) -> int:
    """Asks for random texts until the server is gone. Returns the number of answers, all of which were right."""
    answers = 0
    with suppress(httpx.TransportError):
        while True:
            text = rng.choice(list(expected))
            found = answer(server, text, prompt_cache_key=text[:8])
            assert (found["answer"], found["text"]) == expected[text]
            answers += 1
    return answers


@pytest.mark.slow
@pytest.mark.timeout(60 + 60 * KILLS)
def test_kills_at_random_moments_lose_nothing(server: ServerFactory, start: Start, model: Path) -> None:
    """Whatever a server was doing when it was killed, the next one has all that was on disk, and answers the same."""
    rng = random.Random(72)
    texts = [f"{number}. {TEXT}"[: rng.randrange(200, len(TEXT))] for number in range(24)]
    plain = server(f"--model-id={model}", "--dtype=float32").wait_until_ready()
    expected = {text: (found["answer"], found["text"]) for text in texts for found in [answer(plain, text)]}
    plain.stop()
    known: dict[str, int] = {}  # tokens that were read from disk
    answers = lost = 0
    for _ in range(KILLS):
        running = start()
        assert "damaged files" not in running.lines()
        # As the first ones of a server: what they find is on disk.
        for text in rng.sample(texts, 3):
            found = answer(running, text, prompt_cache_key=text[:8])
            assert (found["answer"], found["text"]) == expected[text]
            whole = found["cached"] // BLOCK * BLOCK
            lost += whole < known.get(text, 0)
            known[text] = max(known.get(text, 0), whole)
        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(_ask_until_killed, running, random.Random(rng.random()), expected) for _ in range(3)]
            time.sleep(rng.uniform(0.0, 1.5))
            kill(running)
            answers += sum(each.result() for each in asking)
    print(f"{KILLS} kills, {answers + 3 * KILLS} right answers, {lost} texts lost, {sum(known.values())} tokens found")
    assert lost == 0
    assert sum(known.values()) > 0
