"""The gRPC service turns an engine's errors into statuses, and ends its process only when the device is lost."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import TextGenerationServiceStub, add_TextGenerationServiceServicer_to_server
from tests.timing import eventually
from tgi_server.engine.backends.lora import LoraDelta
from tgi_server.engine.errors import InvalidAdapter, InvalidCall, ModelNotFound, NotEnoughMemory, PeerLost
from tgi_server.engine.load_parts import LoadedModel
from tgi_server.engine.lora.loaded import ReadAdapter
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.sleep import SleepingModel
from tgi_server.shard.service import Place, TextGenerationService
from tgi_server.shard.sleep_calls import SleepCalls

PLACES = [Place("unix:///a", "unix:///a-grammars"), Place("ipv4:10.0.0.2:1", "ipv4:10.0.0.2:2")]
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate"


class Adapters:
    """Stands for the engine's adapters. held: by name."""

    def __init__(self) -> None:
        self.held: dict[str, ReadAdapter] = {}

    def fetch(self, adapter_id: str, folder: Path) -> ReadAdapter:
        if folder == Path("/wrong"):
            raise InvalidAdapter(f"{folder} has no adapter_config.json")
        if folder == Path("/base-gone"):
            raise ModelNotFound("no model folder at /base")
        if folder == Path("/odd"):
            raise ValueError("no such thing")
        return ReadAdapter(4, {0: LoraDelta(torch.zeros(5, 5), [], [], None, None)})

    def put(self, name: str, adapter: ReadAdapter) -> None:
        self.held[name] = adapter

    def drop(self, name: str) -> None:
        self.held.pop(name)


class Engine:
    """Stands in for an engine. fault: what warming up raises. poisoned: the device computes nothing any more."""

    def __init__(self) -> None:
        self.info = LoadedModel(
            model_type="llama",
            dtype="float32",
            device_type="cpu",
            vocab_size=100,
            max_position_embeddings=64,
            eos_token_ids=(2,),
            bos_token_id=1,
            decoder_start_token_id=None,
            paged=True,
            states=False,
            encoder_decoder=False,
            block_size=16,
            grammars=False,
            forward_pass="one kernel call",
            quantization="",
            linear_kernels="float32: fma",
            kv_cache_dtype="float32",
            speculate=0,
        )
        self.batch = None
        self.fallbacks = ["attention runs in plain torch"]
        self.fault: Exception | None = None
        self.poisoned = False
        self.asked: dict[str, Any] = {}
        self.adapters = Adapters()
        self.tower = None

    def warm_up(self, **asked: Any) -> CacheCapacity:
        self.asked = asked
        if self.fault is not None:
            raise self.fault
        return CacheCapacity(
            block_size=16, max_batch_size=4, num_blocks=9, max_total_tokens=64, max_batch_total_tokens=144
        )

    def check_device(self) -> None:
        if self.poisoned:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def clear(self, batch_id: int | None = None) -> None:
        pass

    def step(self, batch_id: int, **_: Any) -> None:
        if self.fault is not None:
            raise self.fault


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def ended() -> list[bool]:
    """Has an entry once the service has asked for the end of its process."""
    return []


@pytest.fixture
async def stub(engine: Engine, ended: list[bool], tmp_path: Path) -> AsyncIterator[TextGenerationServiceStub]:
    server = grpc.aio.server()
    on_fatal: Callable[[], None] = lambda: ended.append(True)  # noqa: E731
    sleep = SleepCalls(SleepingModel(engine, (), tmp_path), None, None, on_fatal)
    service = TextGenerationService(engine, "maker/tiny", "v2", PLACES, None, sleep, on_fatal)
    add_TextGenerationServiceServicer_to_server(service, server)
    server.add_insecure_port(f"unix://{tmp_path}/shard")
    await server.start()
    async with grpc.aio.insecure_channel(f"unix://{tmp_path}/shard") as channel:
        yield TextGenerationServiceStub(channel)
    await server.stop(0)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return error.value.code(), error.value.details() or ""


async def test_the_router_learns_what_is_served_and_where(stub: Any):
    info = await stub.Info(pb.InfoRequest())
    assert (info.model_id, info.revision, info.world_size, info.vocab_size) == ("maker/tiny", "v2", 2, 100)
    places = await stub.ServiceDiscovery(pb.ServiceDiscoveryRequest())
    assert list(places.urls) == ["unix:///a", "ipv4:10.0.0.2:1"]
    assert list(places.grammar_urls) == ["unix:///a-grammars", "ipv4:10.0.0.2:2"]


async def test_adapters_are_read_kept_and_forgotten(stub: Any, engine: Engine):
    for name, check_only in (("a", False), ("b", True)):
        read = await stub.LoadAdapter(pb.LoadAdapterRequest(adapter_id=name, folder="/a", check_only=check_only))
        assert (read.rank, read.bytes) == (4, 100)
    assert list(engine.adapters.held) == ["a"]
    await stub.UnloadAdapter(pb.UnloadAdapterRequest(adapter_id="a"))
    assert not engine.adapters.held
    status, message = await refusal(stub.LoadAdapter(pb.LoadAdapterRequest(adapter_id="a", folder="/wrong")))
    assert status is grpc.StatusCode.FAILED_PRECONDITION
    assert message == "/wrong has no adapter_config.json"


@pytest.mark.logs_tracebacks
async def test_an_adapter_that_breaks_its_reader_is_refused_and_drops_no_batch(
    stub: Any, caplog: pytest.LogCaptureFixture
) -> None:
    status, message = await refusal(stub.LoadAdapter(pb.LoadAdapterRequest(adapter_id="a", folder="/odd")))
    assert status is grpc.StatusCode.FAILED_PRECONDITION
    assert message == "/odd cannot be read: ValueError: no such thing"
    assert "dropped" not in caplog.text


async def test_images_for_a_model_that_reads_none(stub: Any) -> None:
    status, message = await refusal(stub.EncodeImages(pb.EncodeImagesRequest(images=[pb.Image()])))
    assert (status, message) == (grpc.StatusCode.FAILED_PRECONDITION, "the model does not read images")


async def test_a_model_folder_that_has_vanished_is_no_fault_of_the_request(stub: Any):
    adapter = pb.LoadAdapterRequest(adapter_id="a", folder="/base-gone")
    assert await refusal(stub.LoadAdapter(adapter)) == (grpc.StatusCode.INTERNAL, "no model folder at /base")


async def test_warming_up_tells_what_fits(stub: Any, engine: Engine):
    capacity = await stub.Warmup(pb.WarmupRequest(max_batch_size=4, max_prefill_tokens=64))
    assert (capacity.num_blocks, capacity.max_total_tokens, capacity.max_batch_total_tokens) == (9, 64, 144)
    assert list(capacity.fallbacks) == ["attention runs in plain torch"]
    assert engine.asked.items() >= {"max_batch_size": 4, "max_prefill_tokens": 64, "max_total_tokens": None}.items()


@pytest.mark.parametrize(
    ("fault", "status", "told"),
    [
        (InvalidCall("a chunk past the end"), grpc.StatusCode.FAILED_PRECONDITION, "a chunk past the end"),
        (
            InvalidAdapter("key \ud800 is " + "\U0001f370" * 10_000),
            grpc.StatusCode.FAILED_PRECONDITION,
            "key \\ud800 is",
        ),
        (NotEnoughMemory("no room"), grpc.StatusCode.RESOURCE_EXHAUSTED, "no room"),
        (torch.cuda.OutOfMemoryError("6 GiB"), grpc.StatusCode.RESOURCE_EXHAUSTED, "out of device memory"),
        (MemoryError(), grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory"),
        (RuntimeError(f"[enforce fail] {NO_MEMORY} 9 bytes"), grpc.StatusCode.RESOURCE_EXHAUSTED, "out of memory"),
        (PeerLost("shard 1 has ended"), grpc.StatusCode.INTERNAL, "shard 1 has ended"),
    ],
)
async def test_an_error_of_the_engine_becomes_a_status(
    stub: Any, engine: Engine, ended: list[bool], fault: Exception, status: grpc.StatusCode, told: str
):
    engine.fault = fault
    code, details = await refusal(stub.Warmup(pb.WarmupRequest()))
    assert code is status
    assert told in details
    engine.fault = None
    await stub.Warmup(pb.WarmupRequest())
    assert not ended


@pytest.mark.logs_tracebacks
async def test_a_fault_of_the_code_is_logged_whole_and_told_in_one_line(
    stub: Any, engine: Engine, ended: list[bool], caplog: pytest.LogCaptureFixture
):
    engine.fault = RuntimeError("shapes differ\nat line 7")
    assert await refusal(stub.Warmup(pb.WarmupRequest())) == (grpc.StatusCode.INTERNAL, "shapes differ")
    assert "a step failed; the batch is dropped" in caplog.messages
    assert not ended


@pytest.mark.logs_tracebacks
async def test_a_lost_device_ends_the_process(stub: Any, engine: Engine, ended: list[bool]):
    engine.poisoned = True
    code, details = await refusal(stub.Health(pb.HealthRequest()))
    assert code is grpc.StatusCode.INTERNAL
    assert "illegal memory access" in details
    assert ended == [True]


async def run_step(stub: Any) -> str:
    """Returns why a step failed, which has to be told within seconds."""
    stream = stub.Run()
    await stream.write(pb.Call(decode=pb.DecodeRequest(batch_id=1)))
    answer = await asyncio.wait_for(stream.read(), 5)
    stream.cancel()
    return str(answer.failure.reason)


async def test_a_step_that_runs_out_of_memory_fails_alone(stub: Any, engine: Engine, ended: list[bool]):
    engine.fault = MemoryError()
    assert await run_step(stub) == "out of memory: the batch or adapter was dropped"
    assert not ended


async def test_a_shard_without_memory_for_a_step_ends_if_the_others_wait_for_it(
    stub: Any, engine: Engine, ended: list[bool]
):
    engine.fault, engine.poisoned = MemoryError(), True  # as shards are that are out of step
    await run_step(stub)
    assert ended == [True]


@pytest.mark.logs_tracebacks
async def test_any_error_of_a_step_is_told(stub: Any, engine: Engine):
    engine.fault = ZeroDivisionError()
    assert await run_step(stub) == "ZeroDivisionError"


async def test_without_memory_for_a_line_of_the_log_the_process_ends(
    stub: Any, engine: Engine, ended: list[bool], monkeypatch: pytest.MonkeyPatch
):
    def no_memory(*_: Any, **__: Any) -> None:
        raise MemoryError

    engine.fault = MemoryError()
    monkeypatch.setattr(logging.getLogger("tgi_server.shard.service"), "error", no_memory)
    stream = stub.Run()
    await stream.write(pb.Call(decode=pb.DecodeRequest(batch_id=1)))
    await eventually(lambda: ended == [True])
    stream.cancel()
