"""The account of the memory held for clients, compared with the memory that the router's process really has."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.conftest import FreePort
from tests.image_processors import as_data_url, as_file, save_processor
from tests.integration.router.conftest import shard_process
from tests.integration.router.process import Start
from tests.integration.router.test_memory import MIB, Running, asking, resident, running
from tgi_server import demo_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell"),
]

APART = 1.5
# Parts of the allocator's heap that are in use by and by, and that it keeps of what a request needed for a moment.
ALLOCATOR = 16 * MIB
# What has to be held for the comparison to mean something.
ENOUGH = 64 * MIB
SETTLE_SECONDS = 90.0


@pytest.fixture(scope="module")
def shard_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a shard that takes images and long prompts, and needs 20 ms for each token."""
    flags = "--images", "--max-total-tokens=131072", "--step-seconds=0.02"
    with shard_process(tmp_path_factory.mktemp("shard") / "socket", *flags) as path:
        yield path


def flags(shard: Path, port: int, model: Path | str) -> tuple[str, list[str]]:
    """Returns the URL of a router, and its flags."""
    return f"http://127.0.0.1:{port}", [
        *(f"--tokenizer-name={model}", f"--master-shard-uds-path={shard}", "--hostname=127.0.0.1", f"--port={port}"),
        *("--max-client-memory=4096", "--client-timeout=600"),
    ]


def counted(url: str) -> int:
    """Returns the bytes that the account holds."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return int(float(next(line for line in lines if line.startswith("tgi_client_memory_bytes ")).split()[1]))


def settled(router: Running, least: int = 0) -> tuple[int, int]:
    """Returns what the account holds, at least so much, and the process's memory, once both stay as they are."""
    url, process = router
    deadline, seen = time.monotonic() + SETTLE_SECONDS, [(0, 0)]
    while time.monotonic() < deadline:
        time.sleep(2)
        seen.append((counted(url), resident(process)))
        steady = len(seen) > 3 and all(abs(new - old) < MIB for new, old in zip(seen[-1], seen[-3], strict=True))
        if steady and seen[-1][0] >= least:
            break
    return seen[-1]


def noise(number: int) -> str:
    """Returns an image whose file is large."""
    pixels = np.random.default_rng(number).integers(0, 256, (1_000, 1_000, 3), np.uint8)
    return as_data_url(as_file(Image.fromarray(pixels)))


def long_prompt(number: int) -> tuple[bytes, Any]:
    """A request that is being generated, or waits for that."""
    text = "Melt the butter in a pan, then add the milk and the sugar. " * 2_000
    return b"/generate", {"inputs": f"{number} {text}", "parameters": {"max_new_tokens": 20_000, "ignore_eos": True}}


def image(number: int) -> tuple[bytes, Any]:
    part = {"type": "image_url", "image_url": {"url": noise(number)}}
    return b"/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}


def unread_answer(_: int) -> tuple[bytes, Any]:
    return b"/tokenize", {"inputs": "1 " * 30_000}


def unread_stream(_: int) -> tuple[bytes, Any]:
    """Ends with less unread than what a stream is broken off for."""
    parameters = {"max_new_tokens": 2_400, "ignore_eos": True, "top_n_tokens": 5}
    return b"/generate_stream", {"inputs": "Hello", "parameters": parameters}


@pytest.mark.parametrize(
    ("request_of", "clients"), [(long_prompt, 60), (image, 20), (unread_answer, 100), (unread_stream, 100)]
)
def test_the_account_is_what_the_process_has(
    start: Start,
    shard_path: Path,
    free_port: FreePort,
    tmp_path: Path,
    request_of: Callable[[int], tuple[bytes, Any]],
    clients: int,
) -> None:
    """Images wait for decoders that stand still."""
    model = save_processor("qwen2_5_vl", tmp_path / "model") if request_of is image else demo_model.PATH
    router = url, process = running(start, flags(shard_path, free_port(), model))
    before = settled(router)
    with ExitStack() as stack:
        for decoder in psutil.Process(process.popen.pid).children():
            decoder.suspend()
            stack.callback(decoder.resume)
        for number in range(clients):
            path, body = request_of(number)
            stack.enter_context(asking(url, path, json.dumps(body).encode()))
        after = settled(router, ENOUGH)
    held, grown = (new - old for new, old in zip(after, before, strict=True))
    print(f"{request_of.__name__}: counted {held / MIB:.0f} MiB, grown by {grown / MIB:.0f} MiB")
    assert held >= ENOUGH
    assert grown <= APART * held + ALLOCATOR
    assert held <= APART * (grown + ALLOCATOR)
