"""Adapters that come and go while requests wait for them."""

import asyncio
from typing import cast

import pytest

from tests.fakes.recording_sink import RecordingSink
from tests.fakes.simulation import AdapterShards, Simulation
from tests.timing import eventually
from tgi_server.router.errors import InvalidRequest, NoSuchAdapter
from tgi_server.router.scheduling.adapter_registry import Adapters
from tgi_server.router.scheduling.shard_client import ShardedClient


class Served:
    """Some adapters, of which the shards hold `max_loras`, and a scheduler."""

    def __init__(self, max_loras: int, **limits: int) -> None:
        self.shards = AdapterShards()
        self.adapters = Adapters(cast(ShardedClient, self.shards), max_loras)
        self.simulation = Simulation(adapters=self.adapters, num_blocks=64, **limits)

    async def add(self, *names: str) -> None:
        for name in names:
            await self.adapters.add(name, f"/adapters/{name}")

    def submit(self, adapter: str | None, tokens: int = 8) -> RecordingSink:
        return self.simulation.submit([1, 2, 3], tokens, adapter_id=adapter, ignore_eos=True)

    async def turn(self) -> bool:
        """Does what the scheduler's task does, and lets loads go on. Checks what runs."""
        busy = self.simulation.turn()
        for sequence in self.simulation.batch:
            if sequence.adapter is not None:
                assert sequence.adapter.key in self.shards.held
        for _ in range(3):
            await asyncio.sleep(0)
        return busy or len(self.simulation.waiting) > 0

    async def run(self) -> None:
        for _ in range(1000):
            if not await self.turn():
                self.simulation.check_tokens()
                return
        raise AssertionError("the requests do not end")


async def test_as_many_are_held_as_there_is_room_for_and_the_others_are_checked() -> None:
    served = Served(max_loras=2)
    await served.add("a", "b", "c")
    assert served.shards.held == ["a#1", "b#2"]
    assert [(each.id, each.rank, each.ready) for each in served.adapters] == [
        ("a", 4, True),
        ("b", 4, True),
        ("c", 4, False),
    ]


async def test_an_adapter_that_cannot_be_read_is_not_there() -> None:
    served = Served(max_loras=1)
    served.shards.broken.add("/adapters/a")
    with pytest.raises(InvalidRequest, match="has no adapter_config"):
        await served.add("a")
    assert not len(served.adapters)
    served.shards.broken.clear()
    await served.add("a")
    with pytest.raises(InvalidRequest, match="there is an adapter 'a' already"):
        await served.add("a")
    with pytest.raises(NoSuchAdapter, match="there is no adapter 'x' on this server; it has 'a'"):
        served.adapters.find("x")


async def test_others_run_while_an_adapter_waits_for_the_place_of_a_running_one() -> None:
    served = Served(max_loras=1)
    await served.add("a", "b")
    first, second, third = served.submit("a", 12), served.submit("b"), served.submit(None)
    await served.run()
    assert all(each.reason is not None for each in (first, second, third))
    assert served.shards.held == ["b#2"]


async def test_steps_go_on_while_an_adapter_is_read() -> None:
    served = Served(max_loras=1)
    await served.add("a", "b")
    served.shards.loading.clear()
    waiting, running = served.submit("b"), served.submit(None)
    while running.reason is None:
        await served.turn()
    assert not waiting.tokens
    served.shards.loading.set()
    await served.run()
    assert waiting.reason is not None


@pytest.mark.parametrize("refused", [False, True])
async def test_requests_wait_quietly_for_the_place_of_an_adapter_that_is_being_added(
    refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(max_loras=1)
    await served.add("a", "b")
    await served.adapters.remove("a")
    served.shards.loading.clear()
    adding = asyncio.create_task(served.add("c"))
    await asyncio.sleep(0)
    waiting = served.submit("b")
    served.simulation.scheduler.start()
    for _ in range(20):
        await asyncio.sleep(0)
    assert not caplog.messages
    if refused:
        served.shards.broken.add("/adapters/c")
    served.shards.loading.set()
    await eventually(lambda: waiting.ended)
    assert waiting.reason is not None
    assert served.shards.held == ["b#2"]
    await asyncio.wait([adding])
    assert (adding.exception() is not None) == refused
    await served.simulation.scheduler.stop()


async def test_with_one_place_every_turn_is_an_eviction() -> None:
    served = Served(max_loras=1, max_waiting_tokens=0)
    await served.add("a", "b", "c")
    sinks = [served.submit(adapter) for adapter in ("a", "b", None, "c", "a", "b", "c", "a")]
    await served.run()
    assert all(sink.reason is not None for sink in sinks)


async def test_nobody_waits_for_ever_for_an_adapter_s_place() -> None:
    served = Served(max_loras=1, max_waiting_tokens=4)
    await served.add("a", "b")
    served.submit("a", 6)
    waiting = served.submit("b")
    for _ in range(60):
        if served.simulation.waiting.get(waiting_id := 2) is None:
            break
        served.submit("a", 6)
        await served.turn()
    assert served.simulation.waiting.get(waiting_id) is None
    await served.run()
    assert waiting.reason is not None


async def test_all_that_wait_for_places_come_before_others_that_came_later() -> None:
    served = Served(max_loras=4, max_waiting_tokens=4)
    held, others = [f"held {each}" for each in range(4)], [f"other {each}" for each in range(12)]
    await served.add(*held, *others)
    running = {adapter: served.submit(adapter, 16 + place) for place, adapter in enumerate(held)}
    waiting = [served.submit(adapter, 16) for adapter in others]
    again = []
    while any(sink.reason is None for sink in waiting):
        for adapter in (each for each in held if running[each].reason is not None):
            again.append(running[adapter])
            running[adapter] = served.submit(adapter, 16)
        await served.turn()
    assert len(again) == len(held)


async def test_requests_of_an_adapter_that_is_gone_from_the_disk_fail_alone() -> None:
    served = Served(max_loras=1)
    await served.add("a", "b")
    served.shards.broken.add("/adapters/b")
    lost, other = served.submit("b"), served.submit("a")
    await served.run()
    assert "the adapter 'b' could not be loaded" in str(lost.error)
    assert other.reason is not None
    served.shards.broken.clear()
    again = served.submit("b")
    await served.run()
    assert again.reason is not None


async def test_an_adapter_gives_way_only_when_no_step_on_its_way_needs_it() -> None:
    served = Served(max_loras=1)
    await served.add("a", "b")
    simulation = served.simulation
    simulation.submit([1] * 60, 8, adapter_id="a")
    simulation.send()
    simulation.cancel(1)
    waiting = served.submit("b")
    while simulation.send():
        pass
    await asyncio.sleep(0)
    assert served.shards.held == ["a#1"], "a step on its way computes for a request that has been cancelled"
    await served.run()
    assert waiting.reason is not None
    assert served.shards.held == ["b#2"]


async def test_one_that_is_removed_serves_those_who_named_it_and_nobody_else() -> None:
    served = Served(max_loras=2)
    await served.add("a", "b")
    running = served.submit("a")
    await served.turn()
    await served.adapters.remove("a")
    await served.adapters.remove("b")
    assert served.shards.held == ["a#1"]
    with pytest.raises(NoSuchAdapter, match="it has none"):
        served.adapters.find("a")
    await served.run()
    assert running.reason is not None


async def test_an_id_that_is_used_again_shares_nothing_with_the_one_before() -> None:
    served = Served(max_loras=2)
    await served.add("a")
    first = served.simulation.submit([1] * 20, 2, adapter_id="a")
    await served.run()
    await served.adapters.remove("a")
    await served.add("a")
    again = served.simulation.submit([1] * 20, 2, adapter_id="a")
    await served.run()
    assert first.reason is not None
    assert again.reason is not None
    assert [message.cached_tokens for call in served.simulation.prefills() for message in call.requests] == [0, 0]


async def test_what_was_written_with_one_adapter_is_a_draft_for_that_one_only() -> None:
    served = Served(max_loras=2, speculate=4)
    await served.add("a", "b")
    replies = []
    for adapter in ("a", "b", None, "a", "b", None):
        replies.append(served.submit(adapter, tokens=20).tokens)
        await served.run()
    drafts = [list(message.earlier_reply) for call in served.simulation.prefills() for message in call.requests]
    assert drafts[:3] == [[], [], []]
    assert all(drafts[3:])
    for reply, draft in zip(replies[:3], drafts[3:], strict=True):
        assert reply[: len(draft)] == draft
    assert len({tuple(reply) for reply in replies}) == 3


async def test_memory_for_those_that_may_come() -> None:
    served = Served(max_loras=4)
    await served.add("a", "b")
    assert served.adapters.missing_bytes(2) == 0
    assert served.adapters.missing_bytes(100) == 200
