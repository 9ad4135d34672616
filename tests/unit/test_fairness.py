"""Clients take turns: small work waits for one piece of large work at most."""

import asyncio

from tgi_server.fairness import FairQueue


class Work:
    """Work on a queue with a clock of its own. began: names of the work that has begun, in order."""

    def __init__(self, places: int, most_of_one: int | None = None) -> None:
        self.now = 0.0
        self.queue = FairQueue(places, most_of_one, clock=lambda: self.now)
        self.began: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def submit(self, name: str, client: str, size: float = 0.0) -> None:
        async def work() -> None:
            async with self.queue.place(client, size):
                self.began.append(name)
                await self._ends[name].wait()

        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(work())
        await settle()

    async def end(self, name: str, seconds: float) -> None:
        """Ends work, seconds after what happened last."""
        self.now += seconds
        self._ends[name].set()
        await settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await settle()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_small_work_waits_for_one_large_piece_of_another_client() -> None:
    work = Work(1)
    for number in range(8):
        await work.submit(f"large {number}", "a", 100.0)
    await work.end("large 0", 10.0)
    await work.submit("small", "b", 1.0)
    await work.end("large 1", 10.0)
    assert work.began == ["large 0", "large 1", "small"]
    await work.end("small", 0.1)
    assert work.began[3:] == ["large 2"]


async def test_of_one_client_the_smallest_goes_first() -> None:
    work = Work(1)
    for name, size in (("first", 5.0), ("large", 100.0), ("small", 1.0), ("medium", 10.0)):
        await work.submit(name, "a", size)
    for name in ("first", "small", "medium"):
        await work.end(name, 1.0)
    assert work.began == ["first", "small", "medium", "large"]


async def test_clients_get_equal_time() -> None:
    work = Work(1)
    for number in range(20):
        await work.submit(f"a{number}", "a")
        await work.submit(f"b{number}", "b")
    for _ in range(20):
        name = work.began[-1]
        await work.end(name, 3.0 if name.startswith("a") else 1.0)
    names = [name[0] for name in work.began[:20]]
    assert (names.count("a"), names.count("b")) == (5, 15)


async def test_one_client_leaves_places_for_others() -> None:
    work = Work(4, most_of_one=2)
    for number in range(4):
        await work.submit(f"a{number}", "a")
    assert work.began == ["a0", "a1"]
    await work.submit("b", "b")
    assert work.began == ["a0", "a1", "b"]
    await work.end("a1", 1.0)
    assert work.began == ["a0", "a1", "b", "a2"]


async def test_who_leaves_gives_its_turn_and_its_place_back() -> None:
    work = Work(1)
    for name, client in (("first", "a"), ("second", "b"), ("third", "c")):
        await work.submit(name, client)
    await work.cancel("second")
    await work.cancel("first")
    assert work.began == ["first", "third"]
    await work.cancel("third")
    await work.submit("fourth", "a")
    assert work.began[-1] == "fourth"


async def test_a_turn_that_comes_as_its_client_leaves_is_passed_on() -> None:
    work = Work(1)
    await work.submit("first", "a")
    await work.submit("second", "b")
    await work.submit("third", "c")
    work.tasks["second"].cancel()
    work._ends["first"].set()
    await settle()
    assert work.began == ["first", "third"]
