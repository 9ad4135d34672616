import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from shared.stubs import generate_pb2 as pb
from shared.stubs.generate_pb2_grpc import add_TextGenerationServiceServicer_to_server
from tests.fakes.simulated_shard import RunningShards, SimulatedShard, running_shards
from tgi_server.router.errors import GenerationFailed, Unhealthy
from tgi_server.router.scheduling import calls
from tgi_server.router.scheduling.shard_client import ShardClient, ShardedClient


@asynccontextmanager
async def connected(shards: int, call_timeout_s: float = 20.0) -> AsyncIterator[tuple[ShardedClient, RunningShards]]:
    async with running_shards(*(SimulatedShard(16, 4) for _ in range(shards))) as running:
        client = await ShardedClient.connect(running.path, timeout_s=10, call_timeout_s=call_timeout_s)
        try:
            yield client, running
        finally:
            await client.close()


def prefill(prompt: list[int], max_new_tokens: int = 4) -> pb.Call:
    request = pb.Request(
        id=1, input_ids=prompt, max_new_tokens=max_new_tokens, ignore_eos=True, block_ids=list(range(1, 17))
    )
    chunk = pb.Chunk(request_id=1, tokens=len(prompt))
    return pb.Call(prefill=pb.PrefillRequest(batch_id=1, requests=[request], chunks=[chunk]))


DECODE = calls.decode_call(1, ())


async def test_finds_all_shards_and_says_what_fits_on_each() -> None:
    async with connected(3) as (client, running):
        running.services[1].shard.num_blocks = 7
        assert (await client.info()).block_size == 4
        capacity = await client.warmup(pb.WarmupRequest())
        assert (capacity.num_blocks, capacity.max_batch_total_tokens) == (7, 28)
        await client.health(10)


async def test_shards_that_listen_later_are_waited_for() -> None:
    async with running_shards(SimulatedShard(16, 4), SimulatedShard(16, 4)) as running:
        second = f"unix://{running.path.removesuffix('0')}1"
        await running.servers[1].stop(None)
        connecting = asyncio.create_task(ShardedClient.connect(running.path, timeout_s=10))
        await asyncio.wait([connecting], timeout=0.3)
        assert not connecting.done()
        late = grpc.aio.server()
        add_TextGenerationServiceServicer_to_server(running.services[1], late)
        late.add_insecure_port(second)
        await late.start()
        client = await connecting
        assert (await client.info()).block_size == 4
        await client.close()
        await late.stop(None)


async def test_every_call_goes_to_every_shard_in_the_order_in_which_it_was_sent() -> None:
    async with connected(2) as (client, running):
        pending = []
        for batch in range(30):
            pending.append(client.send(prefill([1 + batch % 3] * 40, max_new_tokens=9)))
            pending += [client.send(DECODE) for _ in range(2)]
            pending.append(client.send(calls.filter_call(1, ())))
        for call in pending:
            await call.response()
        for service in running.services:
            assert service.calls == ["prefill", "decode", "decode", "filter_batch"] * 30


@pytest.mark.parametrize("frozen", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_of_shards_that_wait_for_each_other_the_frozen_one_is_named(frozen: int, tmp_path: Path) -> None:
    """A frozen process is a socket to which anybody may connect, and on which nothing is said."""
    async with connected(2, call_timeout_s=0.5) as (_, running):
        await running.servers[frozen].stop(None)
        for service in running.services:
            service.hanging = service.frozen = True
        urls = [f"unix://{running.path.removesuffix('0')}{rank}" for rank in range(2)]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{tmp_path}/frozen")
            listener.listen()
            urls[frozen] = f"unix://{tmp_path}/frozen"
            client = ShardedClient([ShardClient(url, rank) for rank, url in enumerate(urls)], call_timeout_s=0.5)
            told = f"shard {frozen} does not respond; its process is frozen"
            failures = await asyncio.gather(
                client.health(0.5), client.send(prefill([1, 2, 3])).response(), return_exceptions=True
            )
            assert [type(failure) for failure in failures] == [Unhealthy, GenerationFailed]
            assert all(told in str(failure) for failure in failures)
            await client.close()


async def test_shards_that_compute_different_tokens_are_an_error() -> None:
    async with connected(2) as (client, running):
        await client.send(prefill([1, 2, 3], max_new_tokens=8)).response()
        running.services[1].shard.kv[1][0] += 1
        pending = [client.send(DECODE) for _ in range(7)]
        responses = await asyncio.gather(*(call.response() for call in pending), return_exceptions=True)
        errors = [str(each) for each in responses if isinstance(each, GenerationFailed)]
        assert any("shard 1 computed other tokens" in error for error in errors)


async def test_a_shard_that_fails_is_not_waited_for_by_the_others() -> None:
    async with connected(3) as (client, running):
        running.services[1].failing = RuntimeError("out of memory")
        running.services[0].hanging = running.services[2].hanging = True
        with pytest.raises(GenerationFailed, match="shard 1 failed: out of memory"):
            await asyncio.wait_for(client.send(prefill([1, 2])).response(), 10)


async def test_a_call_that_takes_too_long_fails() -> None:
    async with connected(1, call_timeout_s=0.2) as (client, running):
        running.services[0].hanging = True
        with pytest.raises(GenerationFailed, match="shard 0 did not answer in time"):
            await client.send(prefill([1, 2])).response()


async def test_clearing_goes_before_calls_that_hang() -> None:
    async with connected(1) as (client, running):
        running.services[0].hanging = True
        stuck = client.send(prefill([1, 2]))
        waiting = client.send(DECODE)
        await asyncio.sleep(0.05)
        stuck.cancel()
        waiting.cancel()
        running.services[0].hanging = False
        await client.send(calls.clear_call(), timeout_s=5).response()
        response = await client.send(prefill([1, 2])).response()
        assert len(response.step.generations) == 1


async def test_long_prompts_pass() -> None:
    async with running_shards(SimulatedShard(100_000, 16)) as running:
        client = await ShardedClient.connect(running.path)
        call = prefill([60_000] * 1_000_000)
        call.prefill.requests[0].block_ids[:] = range(1, 65_000)
        call.prefill.chunks[0].tokens = 1
        await client.send(call).response()
        await client.close()


async def test_health_names_the_shard_that_is_ill() -> None:
    async with connected(2) as (client, running):
        running.services[1].ill = True
        with pytest.raises(Unhealthy, match="shard 1 failed: the device computes no more"):
            await client.health(10)
        await running.servers[1].stop(None)
        with pytest.raises(Unhealthy, match="shard 1 cannot be reached"):
            await client.health(10)


async def test_a_socket_that_nobody_listens_on_is_unhealthy() -> None:
    with pytest.raises(Unhealthy, match="shard 0"):
        await ShardedClient.connect("/nonexistent/shard-0", timeout_s=0.3)
