"""The stream of calls to a shard, over gRPC, before a real engine with the bundled model."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import TextGenerationServiceStub, add_TextGenerationServiceServicer_to_server
from tgi_server import demo_model
from tgi_server.engine import Engine, EngineConfig
from tgi_server.engine.sleep import SleepingModel
from tgi_server.shard.service import Place, TextGenerationService
from tgi_server.shard.sleep_calls import SleepCalls

PROMPT = [1, 40, 77, 300]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(EngineConfig(demo_model.PATH, dtype=torch.float32))


@pytest.fixture
async def stub(engine: Engine, tmp_path: Path) -> AsyncIterator[TextGenerationServiceStub]:
    url = f"unix://{tmp_path}/shard"
    server = grpc.aio.server()
    place = Place(url, f"{url}-grammars")
    service = TextGenerationService(
        engine,
        "demo",
        None,
        [place],
        None,
        SleepCalls(SleepingModel(engine, (), None), None, None, list),
        on_fatal=lambda: None,
    )
    add_TextGenerationServiceServicer_to_server(service, server)
    server.add_insecure_port(url)
    await server.start()
    async with grpc.aio.insecure_channel(url) as channel:
        stub = TextGenerationServiceStub(channel)
        await stub.Warmup(pb.WarmupRequest(max_batch_size=4, max_prefill_tokens=64, max_total_tokens=64))
        yield stub
    await server.stop(0)


def prefill(request_id: int = 1, batch_id: int = 1) -> pb.Call:
    request = pb.Request(id=request_id, input_ids=PROMPT, max_new_tokens=40, ignore_eos=True, block_ids=[1, 2])
    chunks = [pb.Chunk(request_id=request_id, tokens=len(PROMPT))]
    return pb.Call(prefill=pb.PrefillRequest(batch_id=batch_id, requests=[request], chunks=chunks))


def decode(batch_id: int = 1) -> pb.Call:
    return pb.Call(decode=pb.DecodeRequest(batch_id=batch_id))


async def ask(stream: Any, *calls: pb.Call) -> list[pb.Answer]:
    """All calls are sent before the first answer is read."""
    for call in calls:
        await stream.write(call)
    return [await stream.read() for _ in calls]


def tokens(answers: list[pb.Answer]) -> list[int]:
    return [generation.token_ids[0] for answer in answers for generation in answer.step.generations]


async def test_calls_are_answered_in_their_order(stub) -> None:
    stream = stub.Run()
    keep = pb.Call(filter_batch=pb.FilterBatchRequest(batch_id=1, keep_request_ids=[1]))
    drop = pb.Call(filter_batch=pb.FilterBatchRequest(batch_id=1))
    answers = await ask(stream, prefill(), decode(), keep, decode(), drop, decode())
    kinds = [answer.WhichOneof("answer") for answer in answers]
    assert kinds == ["step", "step", "filter_batch", "step", "filter_batch", "step"]
    assert len(tokens(answers)) == 3
    again = await ask(stream, pb.Call(clear_cache=pb.ClearCacheRequest()), prefill(batch_id=2), decode(2), decode(2))
    assert tokens(again) == tokens(answers)
    stream.cancel()


async def test_what_is_behind_a_call_that_fails_is_not_executed(stub, engine) -> None:
    stream = stub.Run()
    answers = await ask(stream, prefill())
    for call in (prefill(), prefill(request_id=2)):
        await stream.write(call)
    failure = await stream.read()
    assert tokens(answers)
    assert failure.failure.reason == "request 1 is in the batch already"
    assert engine.batch is None
    stream.cancel()
    after = stub.Run()
    assert tokens(await ask(after, prefill())) == tokens(answers)
    after.cancel()


async def test_a_new_stream_takes_the_place_of_the_old_one(stub, engine) -> None:
    old = stub.Run()
    before = await ask(old, prefill(), decode())
    new = stub.Run()
    answers = await ask(new, prefill(request_id=9, batch_id=5), decode(5))
    assert tokens(answers) == tokens(before)
    assert (await old.read()).failure.reason == "another stream has replaced this one"
    await old.write(decode())
    assert len(tokens(await ask(new, decode(5)))) == 1
    old.cancel()
    new.cancel()


async def test_a_router_that_leaves_leaves_nothing_behind(stub, engine) -> None:
    stream = stub.Run()
    await ask(stream, prefill())
    assert engine.batch is not None
    await stream.done_writing()
    assert await stream.read() is grpc.aio.EOF
    assert engine.batch is None
