"""No images of a request block the event loop for other requests."""

import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.image_files import gif
from tests.image_processors import as_data_url, as_file, photograph, save_processor
from tests.integration.router.conftest import shard_process
from tests.integration.router.process import Process, longest_turn
from tests.logs import assert_no_traceback

BOUND_SECONDS = 0.25
TRIES = 3


@pytest.fixture(scope="module")
def image_shard_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a shard whose model reads images, and takes long prompts."""
    path = tmp_path_factory.mktemp("shard") / "socket"
    with shard_process(path, "--images", "--max-total-tokens=131072") as path:
        yield path


@dataclass(slots=True)
class ImageRouter:
    """A router of a model that reads images, in a process of its own. watch: says for how long its loop stood still."""

    http: httpx.AsyncClient
    watch: Path

    async def post(self, path: str, **body: Any) -> httpx.Response:
        """Returns the response. Fails if the loop stood still each time that it was requested."""
        return await self.post_each(path, lambda attempt: body)

    async def post_each(self, path: str, body: Callable[[int], dict[str, Any]]) -> httpx.Response:
        """Returns the response. Fails if the loop stood still each time that it was requested.

        body: of each try. A router remembers images, so each try needs images of its own.
        """
        longest: list[float] = []
        while len(longest) < TRIES and (not longest or longest[-1] > BOUND_SECONDS):
            await longest_turn(self.watch)
            response = await self.http.post(path, json=body(len(longest)))
            longest.append(await longest_turn(self.watch))
        assert longest[-1] <= BOUND_SECONDS, longest
        return response


@pytest.fixture(scope="module")
def running(image_shard_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The URL of a router, and the socket that says for how long its loop stood still."""
    folder = tmp_path_factory.mktemp("router")
    model = save_processor("qwen2_5_vl", folder / "model")
    settings = json.loads((model / "preprocessor_config.json").read_text())
    (model / "preprocessor_config.json").write_text(json.dumps(settings | {"max_pixels": 28 * 28 * 16_384}))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = Process(
        folder / "log",
        f"--tokenizer-name={model}",
        f"--master-shard-uds-path={image_shard_path}",
        "--hostname=127.0.0.1",
        f"--port={port}",
        "--prometheus-port=0",
        "--validation-workers=2",
        watch=folder / "watch",
    )
    try:
        process.until_ready(url := f"http://127.0.0.1:{port}")
        yield url, folder / "watch"
    finally:
        process.popen.terminate()
        process.wait()
    assert_no_traceback(process.log.read_text())


@pytest.fixture
async def router(running: tuple[str, Path]) -> AsyncIterator[ImageRouter]:
    url, watch = running
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        yield ImageRouter(http, watch)


@pytest.mark.parametrize("unit", ["![](data:", "![](data:image/png;base64,A", "![](http://a/b.png "])
async def test_images_in_markdown_that_never_end(router: ImageRouter, unit: str) -> None:
    text = unit * (100_000 // len(unit))
    response = await router.post("/generate", inputs=text, parameters={"max_new_tokens": 2})
    assert response.status_code == 200
    await router.post("/v1/completions", prompt=text, max_tokens=2)
    await router.post("/v1/warm", prompt=text)


async def test_more_images_than_the_prompt_may_have_tokens(router: ImageRouter) -> None:
    response = await router.post("/generate", inputs="![](data:,)" * 200_000)
    assert "must have less than" in response.json()["error"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["a photograph", "a GIF of 56 bytes", "many small images"])
async def test_tensors_of_images_do_not_pass_through_the_loop(router: ImageRouter, kind: str) -> None:
    """A photograph of 12 megapixels has 294 MiB of them."""

    def files(attempt: int) -> list[bytes]:
        if kind == "a photograph":
            return [as_file(photograph(4000, 3000, attempt), "JPEG")]
        if kind == "a GIF of 56 bytes":
            return [gif(5000 - attempt, 5000)]
        return [as_file(photograph(448, 448, 30 * attempt + number), "JPEG") for number in range(30)]

    def body(attempt: int) -> dict[str, Any]:
        parts = [{"type": "image_url", "image_url": {"url": as_data_url(each)}} for each in files(attempt)]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]
        return {"messages": messages, "max_tokens": 2}

    response = await router.post_each("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] > 7_000
