"""Images over gRPC: encoded before their request joins, and its answer is that of `transformers`."""

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import TextGenerationServiceStub, add_TextGenerationServiceServicer_to_server
from tests.image_prompts import ImagePrompt, expected, image_prompt, load_image_reference, make_image_model
from tgi_server.contract import Image
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.sleep import SleepingModel
from tgi_server.engine.vision.tower import VisionTower
from tgi_server.shard.encoder_queue import EncoderQueue
from tgi_server.shard.server import SERVER_OPTIONS
from tgi_server.shard.service import Place, TextGenerationService
from tgi_server.shard.sleep_calls import SleepCalls
from tgi_server.shard.turns import Turns
from tgi_server.shared_bytes import SharedMemory
from tgi_server.wire import image_to_message

NEW = 5
needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has memory without a name")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_image_model("qwen3_vl", tmp_path / "model")


@pytest.fixture
def prompt(folder: Path) -> ImagePrompt:
    return image_prompt(load_image_reference(folder), [(2, 3), (1, 2)])


@pytest.fixture
async def stub(folder: Path, tmp_path: Path) -> AsyncIterator[TextGenerationServiceStub]:
    engine = Engine(EngineConfig(folder))
    queue = EncoderQueue({}, Turns(), beside=True)
    places = [Place("unix:///a", "unix:///b")]
    service = TextGenerationService(
        engine,
        "maker/tiny",
        None,
        places,
        None,
        SleepCalls(SleepingModel(engine, (), None), queue, None, list),
        lambda: None,
        encoders=queue,
    )
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_TextGenerationServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix://{tmp_path}/shard")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix://{tmp_path}/shard") as channel:
        yield TextGenerationServiceStub(channel)
    await server.stop(0)
    queue.close()


def in_shared_memory(image: Image) -> Image:
    """Returns the image with its tensors where another process has put them."""
    copies = SharedMemory.of([tensor.data for tensor in image.tensors if isinstance(tensor.data, bytes)])
    tensors = (replace(tensor, data=copy) for tensor, copy in zip(image.tensors, copies, strict=True))
    return replace(image, tensors=tuple(tensors))


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=needs_memfd)])
async def test_images_are_encoded_before_their_request_joins(
    stub: Any, prompt: ImagePrompt, folder: Path, monkeypatch: pytest.MonkeyPatch, *, shared: bool
) -> None:
    info = await stub.Info(pb.InfoRequest())
    assert (info.images, info.no_images, info.whole_images, info.shares_memory) == (True, "", False, False)
    if shared:
        prompt = replace(prompt, images=list(map(in_shared_memory, prompt.images)))
        probe = image_to_message(prompt.images[0]).tensors[0].shared
        assert (await stub.Info(pb.InfoRequest(probe=probe))).shares_memory
    await stub.Warmup(pb.WarmupRequest(max_batch_size=2, max_prefill_tokens=64, max_total_tokens=96))
    images = [image_to_message(image) for image in prompt.images]
    await stub.EncodeImages(pb.EncodeImagesRequest(images=images))
    monkeypatch.delattr(VisionTower, "_compute")  # so nothing is computed in the step
    request = pb.Request(
        id=1, input_ids=prompt.ids, images=images, max_new_tokens=NEW, ignore_eos=True, block_ids=[1, 2]
    )
    chunks = [pb.Chunk(request_id=1, tokens=len(prompt.ids))]
    calls = [pb.Call(prefill=pb.PrefillRequest(batch_id=1, requests=[request], chunks=chunks, decode=True))]
    calls += [pb.Call(decode=pb.DecodeRequest(batch_id=1)) for _ in range(NEW - 1)]
    answers = [answer async for answer in stub.Run(iter(calls))]
    tokens = [token for answer in answers for each in answer.step.generations for token in each.token_ids]
    assert tokens == expected(load_image_reference(folder), prompt, NEW)


@needs_memfd
async def test_memory_that_is_gone(stub: Any, prompt: ImagePrompt) -> None:
    image = image_to_message(in_shared_memory(prompt.images[0]))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.EncodeImages(pb.EncodeImagesRequest(images=[image]))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "cannot be read from shared memory" in (error.value.details() or "")


async def test_tensors_that_are_no_image(stub: Any, prompt: ImagePrompt) -> None:
    image = image_to_message(prompt.images[0])
    del image.tensors[0]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.EncodeImages(pb.EncodeImagesRequest(images=[image]))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "pixel_values" in (error.value.details() or "")
