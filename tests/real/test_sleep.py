"""Trained models sleep and wake: the same bits, a known prefix from disk, and little memory meanwhile."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.real.conftest import RealServers
from tests.servers import TextGenerationServer

PROMPT = "The keys and values of this text are read from disk once the model is awake. " * 40
MIB = 1 << 20


def asked(server: TextGenerationServer) -> tuple[Any, int]:
    """Returns text and log-probabilities, and the number of cached tokens."""
    body = {"model": "tgi", "prompt": PROMPT, "max_tokens": 16, "temperature": 0, "logprobs": 3}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    choice = answer["choices"][0]
    return (choice["text"], choice["logprobs"]), answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_a_chat_model_sleeps(name: str, real_server: RealServers, tmp_path: Path) -> None:
    disk = f"--prefix-cache-disk=2GiB:{tmp_path}"
    server = real_server(name, "--max-total-tokens=4096", "--enable-sleep-mode", disk)
    before, _ = asked(server)
    shard = server.child("shard")
    for _ in range(2):
        httpx.post(f"{server.url}/sleep", params={"level": 2}, timeout=300).raise_for_status()
        assert shard.memory_info().rss < 480 * MIB
        after, cached = asked(server)
        assert after == before
        assert cached >= 256


def test_an_embedder_sleeps(real_server: RealServers) -> None:
    server = real_server("minilm", "--enable-sleep-mode", flag="--embedding-model-id")
    body = {"inputs": ["A sleeping cat.", "A fast car."]}
    before = httpx.post(f"{server.url}/embed", json=body, timeout=60).raise_for_status().json()
    httpx.post(f"{server.url}/sleep", timeout=60).raise_for_status()
    assert httpx.post(f"{server.url}/embed", json=body, timeout=60).raise_for_status().json() == before
