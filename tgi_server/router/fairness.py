"""Fair queueing of work outside the scheduler."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

from tgi_server.fairness import FairOrder


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
