"""Fair queueing: the client that has used least goes first."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")


class Shares:
    """The service that each client has received, divided by its weight: fair queueing (arXiv:2401.00588).

    A client that returns after a pause starts level with the active ones, so that idle time earns no credit.
    """

    def __init__(self) -> None:
        self._had: defaultdict[str, float] = defaultdict(float)

    def enter(self, client: str, present: Collection[str]) -> None:
        """Registers new work of a client. present: the clients of all other work that waits or runs."""
        if not present:
            self._had.clear()
        elif client not in present:
            self._had[client] = max(self._had[client], min(self._had[each] for each in present))

    def charge(self, client: str, cost: float, weight: float = 1.0) -> None:
        """Charges a client for work."""
        self._had[client] += cost / weight

    def had(self, client: str) -> float:
        """Returns the service that a client has received. The client with the least goes first."""
        return self._had[client]


class FairOrder(Generic[T]):
    """A queue in which clients take turns. A client is charged the seconds for which its work runs.

    The next client is the one that has used least, running work included; its smallest work goes first. So small work
    waits for at most one item of another client, however many are queued.
    """

    def __init__(
        self, gone: Callable[[T], bool], most_of_one: int | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        """gone: returns True for cancelled work. most_of_one: maximum number of items of one client that run at a
        time; None: no limit.
        """
        self._gone = gone
        self._most_of_one = most_of_one
        self._clock = clock
        self._shares = Shares()
        self._numbers = count()
        self._running: dict[int, tuple[str, float]] = {}  # clients, and when their work began
        self._waiting: dict[str, list[tuple[float, int, T]]] = {}  # heaps: size, number, work

    def __len__(self) -> int:
        """Returns the number of queued items. Some of them may be cancelled."""
        return sum(map(len, self._waiting.values()))

    def add(self, client: str, work: T, size: float = 0.0) -> int:
        """Queues work of a client, smaller sizes first. Returns a number that identifies the work."""
        self._shares.enter(client, {each for each, _ in self._running.values()} | self._waiting.keys())
        number = next(self._numbers)
        heappush(self._waiting.setdefault(client, []), (size, number, work))
        return number

    def begin(self) -> tuple[int, T] | None:
        """Starts the next work. Returns it with its number; None if none may run."""
        for each in list(self._waiting):
            self._forget_gone(each)
        client = self._next()
        if client is None:
            return None
        _, number, work = heappop(self._waiting[client])
        self._forget_gone(client)
        self._running[number] = client, self._clock()
        return number, work

    def end(self, number: int) -> bool:
        """Ends work, and charges its client. Returns False if it was not running."""
        if number not in self._running:
            return False
        client, began = self._running.pop(number)
        self._shares.charge(client, self._clock() - began)
        return True

    def drop_beyond(self, most: int) -> T | None:
        """Removes and returns the largest work of the client with the most queued, if more than `most` are queued."""
        for client, waiting in list(self._waiting.items()):
            self._waiting[client] = [each for each in waiting if not self._gone(each[2])]
            heapify(self._waiting[client])
            self._forget_gone(client)
        if len(self) <= most:
            return None
        client = max(self._waiting, key=lambda each: len(self._waiting[each]))
        largest = max(self._waiting[client], key=lambda each: each[:2])
        self._waiting[client].remove(largest)
        heapify(self._waiting[client])
        self._forget_gone(client)
        return largest[2]

    def _next(self) -> str | None:
        """Returns the client that may begin next; None if none may begin."""
        now = self._clock()
        running: Counter[str] = Counter()
        seconds: defaultdict[str, float] = defaultdict(float)
        for client, began in self._running.values():
            running[client] += 1
            seconds[client] += now - began
        most = self._most_of_one
        able = [client for client in self._waiting if most is None or running[client] < most]
        return min(
            able,
            key=lambda each: (self._shares.had(each) + seconds[each], running[each], self._waiting[each][0][1]),
            default=None,
        )

    def _forget_gone(self, client: str) -> None:
        """Drops cancelled work from the head of a client's queue."""
        waiting = self._waiting[client]
        while waiting and self._gone(waiting[0][2]):
            heappop(waiting)
        if not waiting:
            del self._waiting[client]


class FairQueue:
    """A fixed number of places, which clients take in turns. A client is charged the seconds for which it holds one."""

    def __init__(self, places: int, most_of_one: int | None = None, *, clock: Callable[[], float] = monotonic) -> None:
        """most_of_one: maximum number of places that one client may hold; None: no limit."""
        self._free = places
        self._order = FairOrder[asyncio.Future[None]](asyncio.Future.done, most_of_one, clock)

    @asynccontextmanager
    async def place(self, client: str, size: float = 0.0) -> AsyncIterator[None]:
        """Waits for a place, and holds it within the context. A client's smaller sizes go first."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = self._order.add(client, turn, size)
        self._fill()
        try:
            await turn
            yield
        finally:
            turn.cancel()
            self._free += self._order.end(number)
            self._fill()

    def _fill(self) -> None:
        """Gives free places to the next work."""
        while self._free and (begun := self._order.begin()) is not None:
            self._free -= 1
            begun[1].set_result(None)
