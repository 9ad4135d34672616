"""Places for work outside of the scheduler, of which the clients take turns."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic

from tgi_server.fairness import FairOrder


class FairQueue:
    """Places of which clients take turns. The work of a client costs the seconds for which it has a place."""

    def __init__(self, places: int, most_of_one: int | None = None, *, clock: Callable[[], float] = monotonic) -> None:
        """most_of_one: places that one client may have at a time; None: all."""
        self._free = places
        self._order = FairOrder[asyncio.Future[None]](asyncio.Future.done, most_of_one, clock)

    @asynccontextmanager
    async def place(self, client: str, size: float = 0.0) -> AsyncIterator[None]:
        """Waits for a place, and holds it within the context. size: of the work, beside others of the client."""
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
        """Gives free places to those whose turn it is."""
        while self._free and (begun := self._order.begin()) is not None:
            self._free -= 1
            begun[1].set_result(None)
