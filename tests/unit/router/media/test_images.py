"""Images are processed in other processes, once each, into what the family's own processor makes of them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.image_processors import FAMILIES, as_data_url, as_file, photograph, save_processor, tokenizer_of
from tests.timing import eventually
from tgi_server.router.errors import ContextOverflow, DecodingFailed, InvalidRequest
from tgi_server.router.media.fetching import Fetcher
from tgi_server.router.media.images import ImageReader, ImageSource, ProcessedImage
from tgi_server.router.media.workers import Workers
from tgi_server.router.metrics import Metrics

FAMILY = "qwen2_5_vl"


@pytest.fixture
async def readers() -> AsyncIterator[Callable[..., tuple[ImageReader, Workers]]]:
    made: list[ImageReader] = []

    def make(folder: Path, model_type: str = FAMILY, most_tokens: int = 1000, **settings):
        token = FAMILIES[model_type].token
        workers = Workers(save_processor(model_type, folder), 1, 1_000_000, **settings)
        token_id = tokenizer_of(model_type).token_to_id(token)
        made.append(ImageReader(Fetcher([]), workers, token_id, token, most_tokens, Metrics().images))
        return made[-1], workers

    yield make
    for reader in made:
        await reader.close()


def source(data: bytes, **settings) -> ImageSource:
    return ImageSource(as_data_url(data), "messages[0].content[1]", **settings)


async def read(reader: ImageReader, *sources: ImageSource) -> tuple[ProcessedImage, ...]:
    return await reader.read(sources, lambda size: None)


async def test_the_same_image_is_processed_once(readers, tmp_path):
    reader, workers = readers(tmp_path)
    calls: list[bytes] = []
    process = workers.process

    async def counted(data: bytes, detail: str):
        calls.append(data)
        return await process(data, detail)

    workers.process = counted
    one, other = as_file(photograph(100, 60)), as_file(photograph(100, 60, 1))
    held: list[int] = []
    images = await reader.read([source(one), source(other), source(one)], held.append)
    assert images[0] is images[2]
    assert images[0].digest != images[1].digest
    assert held == [image.size for image in images]
    third = as_file(photograph(100, 60, 2))
    same = await asyncio.gather(read(reader, source(third)), read(reader, source(third)))
    assert same[0] == same[1]
    assert len(calls) == 3
    # Another file of the same pixels has the same digest.
    assert (await read(reader, source(as_file(photograph(100, 60), compress_level=1))))[0].digest == images[0].digest


@pytest.mark.slow
async def test_faults_name_the_image(readers, tmp_path):
    reader, _ = readers(tmp_path, most_tokens=100)
    with pytest.raises(InvalidRequest, match=r"`messages\[0\].content\[1\]`: .* no JPEG") as caught:
        await read(reader, source(b"hello"))
    assert caught.value.param == "messages[0].content[1]"
    with pytest.raises(InvalidRequest, match="aspect ratio"):
        await read(reader, source(as_file(photograph(2000, 4))))
    with pytest.raises(ContextOverflow):
        await read(reader, *[source(as_file(photograph(300, 200)))] * 3)
    low, auto = await read(
        reader, source(as_file(photograph(900, 600)), detail="low"), source(as_file(photograph(900, 600)))
    )
    assert low.digest != auto.digest


@pytest.mark.slow
async def test_a_worker_that_dies_is_replaced(readers, tmp_path):
    reader, workers = readers(tmp_path)
    await read(reader, source(as_file(photograph(30, 30))))
    (worker,) = workers._all
    os.kill(worker._process.pid, signal.SIGSTOP)  # so that it dies with a task
    waiting = asyncio.create_task(read(reader, source(as_file(photograph(40, 30)))))
    await eventually(lambda: not workers._idle)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(DecodingFailed, match="messages"):
        await waiting
    assert await read(reader, source(as_file(photograph(40, 30))))
    (other,) = workers._all
    assert other is not worker
    os.kill(other._process.pid, signal.SIGKILL)  # while it is idle, nobody notices
    other._process.wait()
    assert await read(reader, source(as_file(photograph(50, 30))))


@pytest.mark.slow
async def test_a_worker_that_takes_too_long_is_replaced(readers, tmp_path):
    reader, workers = readers(tmp_path)
    await read(reader, source(as_file(photograph(30, 30))))
    workers._image_seconds = 1.0
    (worker,) = workers._all
    os.kill(worker._process.pid, signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match="more than 1 s"):
        await read(reader, source(as_file(photograph(40, 30))))
    assert worker not in workers._all


@pytest.mark.slow
async def test_a_model_without_a_processor_says_so(readers, tmp_path):
    reader, _ = readers(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    (tmp_path / "processor_config.json").unlink()
    with pytest.raises(DecodingFailed, match="images cannot be decoded"):
        await read(reader, source(as_file(photograph(30, 30))))
