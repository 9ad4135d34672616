"""Equal shares among clients: of the scheduler's tokens, and of places for work outside of it."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count
from time import monotonic


class Shares:
    """The share that each client has had, divided by its weight: fair queueing (arXiv:2401.00588).

    Who comes back after a pause is put level with those who are there, so that nobody saves up.
    """

    def __init__(self) -> None:
        self._had: defaultdict[str, float] = defaultdict(float)

    def enter(self, client: str, present: Collection[str]) -> None:
        """Notes that work of the client comes. present: the clients of all other work that waits or runs."""
        if not present:
            self._had.clear()
        elif client not in present:
            self._had[client] = max(self._had[client], min(self._had[each] for each in present))

    def charge(self, client: str, cost: float, weight: float = 1.0) -> None:
        """Notes what was done for a client."""
        self._had[client] += cost / weight

    def had(self, client: str) -> float:
        """Returns what the client has had. The client that has had least goes first."""
        return self._had[client]


class FairQueue:
    """Places for work of which the clients take turns. The work of a client costs the seconds for which it has a place.

    A free place goes to the client that has had least, running work included, and within a client to the smallest
    work. So small work of a client waits for one piece of work of another one at most, however many wait.
    """

    def __init__(self, places: int, most_of_one: int | None = None, *, clock: Callable[[], float] = monotonic) -> None:
        """most_of_one: places that one client may have at a time; None: all."""
        self._free = places
        self._most_of_one = places if most_of_one is None else most_of_one
        self._clock = clock
        self._shares = Shares()
        self._numbers = count()
        self._running: dict[int, tuple[str, float]] = {}  # clients, and when their work began
        self._waiting: dict[str, list[tuple[float, int, asyncio.Future[None]]]] = {}  # heaps: size, number, turn

    @asynccontextmanager
    async def place(self, client: str, size: float = 0.0) -> AsyncIterator[None]:
        """Waits for a place, and holds it within the context. size: of the work, beside others of the client."""
        self._shares.enter(client, {each for each, _ in self._running.values()} | self._waiting.keys())
        number = next(self._numbers)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heappush(self._waiting.setdefault(client, []), (size, number, turn))
        self._fill()
        try:
            await turn
            yield
        finally:
            turn.cancel()
            self._leave(number)

    def _leave(self, number: int) -> None:
        """Frees the place of work, if it has one."""
        if number in self._running:
            client, began = self._running.pop(number)
            self._shares.charge(client, self._clock() - began)
            self._free += 1
        self._fill()

    def _fill(self) -> None:
        """Gives free places to those whose turn it is."""
        for each in list(self._waiting):
            self._forget_cancelled(each)
        while self._free and (client := self._next()) is not None:
            _, number, turn = heappop(self._waiting[client])
            self._forget_cancelled(client)
            self._free -= 1
            self._running[number] = client, self._clock()
            turn.set_result(None)

    def _next(self) -> str | None:
        """Returns the client whose turn it is; None if none may take a place."""
        now = self._clock()
        places: Counter[str] = Counter()
        running: defaultdict[str, float] = defaultdict(float)
        for client, began in self._running.values():
            places[client] += 1
            running[client] += now - began
        able = [client for client in self._waiting if places[client] < self._most_of_one]
        return min(
            able,
            key=lambda each: (self._shares.had(each) + running[each], places[each], self._waiting[each][0][1]),
            default=None,
        )

    def _forget_cancelled(self, client: str) -> None:
        """Drops the work of a client that nobody waits for any more, as far as it would be next."""
        waiting = self._waiting[client]
        while waiting and waiting[0][2].done():
            heappop(waiting)
        if not waiting:
            del self._waiting[client]
