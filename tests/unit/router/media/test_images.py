"""Images are processed in other processes, once each, into what the family's own processor makes of them."""

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.image_processors import FAMILIES, as_data_url, as_file, photograph, save_processor, tokenizer_of
from tests.timing import eventually
from tgi_server.router.errors import ContextOverflow, DecodingFailed, InvalidRequest
from tgi_server.router.media.fetching import Fetcher
from tgi_server.router.media.images import ImageClient, ImageReader, ImageSource, ProcessedImage
from tgi_server.router.media.workers import Workers
from tgi_server.router.metrics import Metrics
from tgi_server.shared_bytes import SharedBytes

FAMILY = "qwen2_5_vl"


class Threads:
    async def run(self, characters: int, work: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(work)


THREADS = Threads()


class Held:
    """The account of a request. most: bytes that it ever had. now: those that it has."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.names: set[bytes] = set()

    def hold(self, size: int) -> None:
        self.now += size
        self.most = max(self.most, self.now)

    def hold_once(self, name: bytes, size: int) -> None:
        if name not in self.names:
            self.names.add(name)
            self.hold(size)

    def give_back(self, size: int) -> None:
        self.now -= size


@pytest.fixture
async def readers() -> AsyncIterator[Callable[..., tuple[ImageReader, Workers]]]:
    made: list[ImageReader] = []

    def make(folder: Path, model_type: str = FAMILY, most_tokens: int = 1000, **settings):
        token = FAMILIES[model_type].token
        workers = Workers(save_processor(model_type, folder), 1, 1_000_000, **settings)
        token_id = tokenizer_of(model_type).token_to_id(token)
        made.append(ImageReader(Fetcher([]), workers, THREADS, token_id, token, most_tokens, Metrics().images))
        return made[-1], workers

    yield make
    for reader in made:
        await reader.close()


def memories(process: str) -> list[str]:
    """Returns the shared memories that a process has open."""
    names = [os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    return [name for name in names if "oatmill" in name]


def source(data: bytes, **settings) -> ImageSource:
    return ImageSource(as_data_url(data), "messages[0].content[1]", **settings)


async def read(
    reader: ImageReader, *sources: ImageSource, name: str = "a", namespace: str = "", account: Held | None = None
) -> tuple[ProcessedImage, ...]:
    return await reader.read(sources, ImageClient(name, namespace, account or Held()))


async def test_the_same_image_is_processed_once(readers, tmp_path):
    reader, workers = readers(tmp_path)
    calls: list[bytes] = []
    process = workers.process

    async def counted(data: bytes, *rest: Any):
        calls.append(data)
        return await process(data, *rest)

    workers.process = counted
    one, other = as_file(photograph(100, 60)), as_file(photograph(100, 60, 1))
    held = Held()
    images = await read(reader, source(one), source(other), source(one), account=held)
    assert images[0] is images[2]
    assert images[0].digest != images[1].digest
    assert held.now == images[0].size + images[1].size
    assert held.most >= held.now + len(one)
    third = as_file(photograph(100, 60, 2))
    same = await asyncio.gather(read(reader, source(third)), read(reader, source(third)))
    assert same[0] == same[1]
    assert len(calls) == 3
    # Who may not know of it has it processed again, and another digest of it.
    own = await read(reader, source(one), namespace="key")
    assert (len(calls), own[0].digest != images[0].digest) == (4, True)
    # Another file of the same pixels has the same digest.
    assert (await read(reader, source(as_file(photograph(100, 60), compress_level=1))))[0].digest == images[0].digest


@pytest.mark.slow
async def test_tensors_come_in_shared_memory_that_goes_with_the_image(readers, tmp_path):
    reader, workers = readers(tmp_path, least_shared=50_000)
    small, large = await read(reader, source(as_file(photograph(30, 30))), source(as_file(photograph(100, 60))))
    assert len(memories("self")) == 1
    names = [{each.name: type(each.data) for each in image.tensors} for image in (small, large)]
    assert names == [
        {"pixel_values": bytes, "image_grid_thw": bytes},
        {"pixel_values": SharedBytes, "image_grid_thw": bytes},
    ]
    as_sent = readers(tmp_path / "sent")[0]
    (same,) = await read(as_sent, source(as_file(photograph(100, 60))))
    pixels, shared = (next(each.data for each in image.tensors if len(each.data) > 100) for image in (same, large))
    assert (same.digest, pixels) == (large.digest, shared.map()[:])
    del shared, large
    reader._remembered.clear()
    gc.collect()
    for process in ("self", *(str(worker.pid) for worker in workers._all)):
        assert not memories(process)


@pytest.mark.slow
async def test_many_small_images_share_one_memory(readers, tmp_path, monkeypatch):
    monkeypatch.setattr("tgi_server.router.media.images.MOST_SENT", 50_000)
    reader, _ = readers(tmp_path)
    reader._shares_memory = True
    files = [source(as_file(photograph(100, 60, each))) for each in range(3)]
    (one,), three = await read(reader, files[0]), await read(reader, *files)
    pixels = [next(each.data for each in image.tensors if each.name == "pixel_values") for image in (one, *three)]
    assert len({each.place for each in pixels[1:]}) == 1
    assert pixels[0].map()[:] == pixels[1].map()[:] != pixels[2].map()[:]
    assert three[0].digest == one.digest


@pytest.mark.slow
async def test_faults_name_the_image(readers, tmp_path):
    reader, _ = readers(tmp_path, most_tokens=100)
    with pytest.raises(InvalidRequest, match=r"`messages\[0\].content\[1\]`: .* not a JPEG") as caught:
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
    os.kill(worker.pid, signal.SIGSTOP)  # so that it dies with a task
    waiting = asyncio.create_task(read(reader, source(as_file(photograph(40, 30)))))
    await eventually(lambda: not workers._idle)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(DecodingFailed, match="messages"):
        await waiting
    assert await read(reader, source(as_file(photograph(40, 30))))
    (other,) = workers._all
    assert other is not worker
    os.kill(other.pid, signal.SIGKILL)  # while it is idle, nobody notices
    other.wait()
    assert await read(reader, source(as_file(photograph(50, 30))))


@pytest.mark.slow
async def test_a_worker_that_takes_too_long_is_replaced(readers, tmp_path):
    reader, workers = readers(tmp_path)
    await read(reader, source(as_file(photograph(30, 30))))
    workers._image_seconds = 1.0
    (worker,) = workers._all
    os.kill(worker.pid, signal.SIGSTOP)
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


@pytest.mark.slow
async def test_an_image_is_processed_no_further_once_its_clients_have_left(readers, tmp_path):
    reader, workers = readers(tmp_path)
    await read(reader, source(as_file(photograph(30, 30))))
    (worker,) = workers._all
    os.kill(worker.pid, signal.SIGSTOP)
    held = [Held() for _ in range(8)]
    first, *others = [
        asyncio.create_task(read(reader, source(as_file(photograph(40 + each // 2, 30))), account=held[each]))
        for each in range(8)
    ]
    await eventually(lambda: len(reader._running) == 4)
    assert all(each.now for each in held), "raw images are counted while they wait"
    first.cancel()
    await asyncio.sleep(0.1)
    assert len(reader._running) == 4, "another request waits for the same image"
    for task in others:
        task.cancel()
    await asyncio.wait([first, *others])
    assert (reader._running, [each.now for each in held]) == ({}, [0] * 8)
    assert worker not in workers._all
    assert await read(reader, source(as_file(photograph(40, 30))))


@pytest.mark.slow
async def test_a_small_image_of_another_client_waits_for_one_large_one(readers, tmp_path):
    reader, _ = readers(tmp_path)
    ended: list[str] = []

    async def timed(name: str, client: str, size: tuple[int, int, int]) -> None:
        await read(reader, source(as_file(photograph(*size))), name=client)
        ended.append(name)

    large = [asyncio.create_task(timed("large", "a", (1000, 1000, each))) for each in range(6)]
    await eventually(lambda: len(reader._running) == 6)
    await timed("small", "b", (30, 30, 0))
    assert len(ended) <= 3
    await asyncio.gather(*large)
