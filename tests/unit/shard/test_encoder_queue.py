"""Requests to encode are computed together, and steps of the model that generates go between layers."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from shared.stubs.generate_pb2 import EncodeInput
from tests.tiny_encoders import make_embedder
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.encoders import Encoder
from tgi_server.shard.encoder_queue import EncoderQueue
from tgi_server.shard.turns import Turns


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = make_embedder("bert", tmp_path_factory.mktemp("bert"))
    return Encoder("embed", EngineConfig(folder, device=torch.device("cpu")))


@pytest.fixture
def queue(encoder: Encoder) -> Iterator[EncoderQueue]:
    made = EncoderQueue({"embed": encoder}, Turns())
    yield made
    made.close()


def inputs(*lengths: int) -> list[EncodeInput]:
    return [EncodeInput(ids=[1 + (place * 7 + length) % 300 for place in range(length)]) for length in lengths]


def values(queue: EncoderQueue, given: list[EncodeInput], **more: float):
    return queue.encode("embed", given, **({"dimensions": 0, "unit": False, "target_gap_s": None} | more))


async def test_requests_that_come_together_get_the_values_of_each_alone(queue: EncoderQueue, encoder: Encoder) -> None:
    requests = [inputs(*range(1 + each, 60, 5)) for each in range(5)]
    answers = await asyncio.gather(*(values(queue, each) for each in requests))
    for given, answer in zip(requests, answers, strict=True):
        alone = torch.cat([encoder.encode([each]) for each in given])
        assert (answer - alone).abs().max() < 1e-4


async def test_a_short_request_does_not_wait_for_a_long_one(queue: EncoderQueue) -> None:
    long = asyncio.ensure_future(values(queue, inputs(*[64] * 1000)))
    await asyncio.sleep(0)
    await values(queue, inputs(5))
    assert not long.done()
    await long


async def test_a_step_waits_for_one_layer_at_most(queue: EncoderQueue, encoder: Encoder) -> None:
    layers: list[int] = []
    in_layer, go_on = threading.Event(), threading.Event()

    def between() -> None:
        queue.turns.pause()
        layers.append(1)
        in_layer.set()
        go_on.wait(30)

    encoder.between = between
    encoding = asyncio.ensure_future(values(queue, inputs(10)))
    await asyncio.to_thread(in_layer.wait, 30)
    step = asyncio.ensure_future(asyncio.to_thread(_step, queue.turns, layers))
    await asyncio.to_thread(_until_waiting, queue.turns)
    go_on.set()
    assert await step == 1
    await encoding
    assert len(layers) == encoder.layers


def _until_waiting(turns: Turns) -> None:
    while not turns.steps_wait:
        threading.Event().wait(0.001)


def _step(turns: Turns, layers: list[int]) -> int:
    """Returns the layers that had begun when the step had its turn."""
    with turns.step():
        return len(layers)


async def test_steps_go_between_the_layers_of_other_work(queue: EncoderQueue) -> None:
    in_layer, done = threading.Event(), threading.Event()

    def work(between: Callable[[], None], seconds: Callable[[], float]) -> str:
        assert 0 < seconds() < 0.2
        in_layer.set()
        while not done.is_set():
            between()
        return "done"

    working = asyncio.ensure_future(queue.run(work, 0.2))
    await asyncio.to_thread(in_layer.wait, 30)
    await asyncio.to_thread(_step, queue.turns, [])
    done.set()
    assert await working == "done"


async def test_what_nobody_waits_for_is_not_computed(queue: EncoderQueue, encoder: Encoder) -> None:
    texts = 0
    encode = encoder.encode

    def counting(given):
        nonlocal texts
        texts += len(given)
        return encode(given)

    encoder.encode = counting
    try:
        gone = asyncio.ensure_future(values(queue, inputs(*[64] * 20_000)))
        await values(queue, inputs(5))
        gone.cancel()
        await values(queue, inputs(5))
        assert texts < 10_000
    finally:
        del encoder.encode


@pytest.mark.logs_tracebacks
async def test_a_failure_is_that_of_its_request_and_the_next_one_is_computed(queue: EncoderQueue) -> None:
    with pytest.raises(IndexError):
        await values(queue, [EncodeInput(ids=[100_000])])
    assert (await values(queue, inputs(3))).shape == (1, 48)


async def test_beside_a_model_that_generates_batches_are_as_small_as_the_target_wants(encoder: Encoder) -> None:
    queue = EncoderQueue({"embed": encoder}, Turns(), beside=True)
    sizes: list[int] = []
    encode = encoder.encode

    def counting(given):
        sizes.append(sum(len(each.ids) for each in given))
        return encode(given)

    encoder.encode = counting
    try:
        await values(queue, inputs(*[50] * 100))
        assert max(sizes) <= 512
        sizes.clear()
        await values(queue, inputs(*[50] * 100), target_gap_s=1e-9)
        assert sizes == [50] * 100
        sizes.clear()
        await values(queue, inputs(*[50] * 100), target_gap_s=1e9)
        assert max(sizes) > 512
    finally:
        del encoder.encode
        queue.close()
