"""A model that falls asleep and wakes, as the scheduler sees it."""

import asyncio
import random
from math import inf
from time import perf_counter

import pytest

from tests.fakes.simulated_shard import SimulatedShard, expected_tokens
from tests.unit.router.scheduling.test_scheduler import House, house
from tgi_server.router.errors import CannotBeInTime, CannotSleep, RequestTimedOut, Unhealthy
from tgi_server.router.scheduling.sleep_mode import SleepState

PROMPT = [1, 2] * 10


HITS = "tgi_prefix_cache_hit_tokens_total"


async def answered(there: House, prompt: list[int] = PROMPT) -> float:
    """Returns how many tokens of a request, which gets the right tokens, were cached."""
    before = there.metric(HITS)
    request, sink, ended = there.submit(prompt)
    await asyncio.wait_for(ended.wait(), 20)
    assert sink.error is None
    assert sink.tokens == expected_tokens(request)
    return there.metric(HITS) - before


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_request_wakes_all_shards_and_finds_nothing_cached(shards: int) -> None:
    async with house(*(SimulatedShard(24, 4) for _ in range(shards))) as there:
        mode, services = there.scheduler.sleep_mode, there.shards.services
        assert [await answered(there) for _ in range(2)] == [0, len(PROMPT) - 1]
        assert await mode.sleep() == 1000 * shards
        assert await mode.sleep() == 0
        assert all(service.asleep for service in services)
        assert there.metric("tgi_asleep") == 1
        assert there.scheduler.batch.memory.cached_tokens == 0
        assert await answered(there) == 0
        assert not any(service.asleep for service in services)
        assert mode.awake
        assert there.metric("tgi_asleep") == 0
        there.scheduler.batch.check()


async def test_running_requests_end_before_and_waiting_ones_after() -> None:
    async with house(step_seconds=0.01) as there:
        mode = there.scheduler.sleep_mode
        _, running, _ = there.submit(PROMPT, 30)
        await there.until(lambda: len(running.tokens) > 2)
        asleep = asyncio.create_task(mode.sleep())
        await asyncio.sleep(0)
        assert mode.state is SleepState.FALLING
        request, sink, ended = there.submit([2, 1])
        await asleep
        assert len(running.tokens) == 30
        assert sink.starts == 0
        await asyncio.wait_for(ended.wait(), 20)
        assert sink.tokens == expected_tokens(request)


async def test_random_requests_among_sleeps_get_their_tokens() -> None:
    rng = random.Random(5)
    async with house(SimulatedShard(24, 4), step_seconds=0.001) as there:
        there.shards.services[0].change_seconds = 0.002
        submitted, changes = [], []
        for _ in range(60):
            prompt = [rng.randrange(1, 3) for _ in range(rng.randrange(1, 30))]
            submitted.append(there.submit(prompt, rng.randrange(1, 25)))
            if rng.random() < 0.4:
                change = there.scheduler.sleep_mode.sleep if rng.random() < 0.7 else there.scheduler.sleep_mode.wake
                changes.append(asyncio.ensure_future(change()))
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() / 50)
        await asyncio.wait_for(asyncio.gather(*changes, *(ended.wait() for _, _, ended in submitted)), 60)
        for request, sink, _ in submitted:
            assert sink.tokens == expected_tokens(request)
        there.scheduler.batch.check()


async def test_another_may_decide_when_it_wakes() -> None:
    async with house() as there:
        mode, wanted = there.scheduler.sleep_mode, []
        mode.on_wanted = lambda: wanted.append(mode.state)
        await mode.sleep()
        assert not mode.wanted
        request, sink, ended = there.submit(PROMPT)
        await asyncio.sleep(0.05)
        assert wanted == [SleepState.ASLEEP]
        assert mode.wanted
        await mode.wake()
        await asyncio.wait_for(ended.wait(), 20)
        assert sink.tokens == expected_tokens(request)
        assert not mode.wanted


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_model_that_cannot_sleep_stays_awake(shards: int) -> None:
    async with house(*(SimulatedShard(24, 4) for _ in range(shards))) as there:
        there.shards.services[-1].sleepless = "it has no folder"
        with pytest.raises(CannotSleep, match="it has no folder"):
            await there.scheduler.sleep_mode.sleep()
        assert there.scheduler.sleep_mode.awake
        assert not any(service.asleep for service in there.shards.services)
        await answered(there)


async def test_requests_of_a_model_that_cannot_wake_fail_and_the_next_one_tries_again() -> None:
    async with house() as there:
        mode, service = there.scheduler.sleep_mode, there.shards.services[0]
        await mode.sleep()
        service.drowsy = True
        _, sink, ended = there.submit(PROMPT)
        await asyncio.wait_for(ended.wait(), 20)
        assert isinstance(sink.error, Unhealthy)
        assert "the weights cannot be read" in str(sink.error)
        with pytest.raises(Unhealthy, match="the weights cannot be read"):
            await mode.wake()
        service.drowsy = False
        await answered(there)


async def test_a_deadline_before_it_is_awake_is_refused_at_once() -> None:
    async with house() as there:
        mode, service = there.scheduler.sleep_mode, there.shards.services[0]
        service.change_seconds = 0.2
        await mode.sleep()
        _, sink, ended = there.submit(PROMPT, deadline=perf_counter() + 0.1)  # the time is not known yet
        await asyncio.wait_for(ended.wait(), 20)
        assert isinstance(sink.error, RequestTimedOut)
        await there.until(lambda: mode.awake)
        await mode.sleep()
        for late in ({"deadline": perf_counter() + 0.1}, {"deadline": inf, "first_token_by": perf_counter() + 0.1}):
            _, sink, _ = there.submit(PROMPT, **late)
            assert isinstance(sink.error, CannotBeInTime)
        assert mode.state is SleepState.ASLEEP
        _, sink, ended = there.submit(PROMPT, deadline=perf_counter() + 60)
        await asyncio.wait_for(ended.wait(), 20)
        assert sink.error is None


async def test_calls_beside_the_steps_wait_for_it_and_keep_it_awake() -> None:
    async with house() as there:
        client, mode = there.scheduler._shards, there.scheduler.sleep_mode
        await mode.sleep()
        async with client.in_use():
            assert mode.awake
            asleep = asyncio.create_task(mode.sleep())
            await asyncio.sleep(0.05)
            assert mode.state is SleepState.FALLING
        await asleep
        assert mode.state is SleepState.ASLEEP
