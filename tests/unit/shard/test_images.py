"""Images over gRPC: encoded before their request joins, and its answer is that of `transformers`."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import TextGenerationServiceStub, add_TextGenerationServiceServicer_to_server
from tests.image_prompts import ImagePrompt, expected, image_prompt, load_image_reference, make_image_model
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.vision_tower import VisionTower
from tgi_server.shard.encoder_queue import EncoderQueue
from tgi_server.shard.server import SERVER_OPTIONS
from tgi_server.shard.service import Place, TextGenerationService
from tgi_server.shard.turns import Turns
from tgi_server.wire import image_to_message

NEW = 5


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
    service = TextGenerationService(engine, "maker/tiny", None, places, None, lambda: None, encoders=queue)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_TextGenerationServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix://{tmp_path}/shard")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix://{tmp_path}/shard") as channel:
        yield TextGenerationServiceStub(channel)
    await server.stop(0)
    queue.close()


async def test_images_are_encoded_before_their_request_joins(
    stub: Any, prompt: ImagePrompt, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = await stub.Info(pb.InfoRequest())
    assert (info.images, info.no_images, info.whole_images) == (True, "", False)
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


async def test_tensors_that_are_no_image(stub: Any, prompt: ImagePrompt) -> None:
    image = image_to_message(prompt.images[0])
    del image.tensors[0]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.EncodeImages(pb.EncodeImagesRequest(images=[image]))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "pixel_values" in (error.value.details() or "")
