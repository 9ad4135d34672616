"""Idle time, on a real event loop."""

import asyncio

from tgi_server.shard.idle_time import IdleTime


class Work:
    """So many pieces, each of which leaves the event loop to others."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces
        self.begun = asyncio.Event()
        self.done = asyncio.Event()

    def __call__(self, seconds: float) -> bool:
        assert seconds > 0
        assert self.left > 0, "called although there was nothing left to do"
        self.left -= 1
        self.begun.set()
        if not self.left:
            self.done.set()
        return self.left > 0


async def test_idle_time_is_used_until_nothing_is_left_to_do() -> None:
    work = Work(3)
    idle = IdleTime(work)
    idle.begins()
    async with asyncio.timeout(10):
        await work.done.wait()
    await asyncio.sleep(0.1)
    work.left = 1
    work.done.clear()
    idle.begins()
    async with asyncio.timeout(10):
        await work.done.wait()


async def test_a_call_ends_it_and_is_not_followed_by_work_at_once() -> None:
    work = Work(10**9)
    idle = IdleTime(work)
    idle.begins()
    await work.begun.wait()
    idle.begins()
    left = work.left
    for _ in range(5):
        await asyncio.sleep(0)
    assert work.left == left
    work.begun.clear()
    await work.begun.wait()
