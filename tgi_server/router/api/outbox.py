"""Server-sent events on their way to one client."""

import asyncio
from collections.abc import Callable

from tgi_server.router.errors import RouterError, SlowReader

_LARGEST_BACKLOG = 2**20
"""Bytes that may wait for a client: some thousand tokens."""


class Outbox:
    """What is to be sent, written by the scheduler's task and read by the response.

    Never waits on a slow client: it is given up when too much waits for it.

    on_overrun: called then; it should end what waits for the client to read.
    """

    __slots__ = ("_closed", "_pending", "_reader", "_waiting", "error", "on_overrun")

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._waiting = 0
        self._reader: asyncio.Future[None] | None = None
        self._closed = False
        self.error: RouterError | None = None
        self.on_overrun: Callable[[], None] | None = None

    def write(self, data: bytes) -> None:
        if self._closed:
            return
        if self._waiting > _LARGEST_BACKLOG:
            self.abandon(SlowReader(f"the client left {self._waiting} bytes of its answer unread"))
            if self.on_overrun is not None:
                self.on_overrun()
            return
        self._pending.append(data)
        self._waiting += len(data)
        self._wake()

    def close(self, error: RouterError | None = None) -> None:
        """Nothing more comes. error: why the stream does not end as it should."""
        if not self._closed:
            self._closed, self.error = True, error
            self._wake()

    def abandon(self, error: RouterError) -> None:
        """Nobody reads any more: what was not sent is dropped."""
        self._pending.clear()
        self.close(error)

    async def read(self) -> bytes:
        """Everything written since the last read; empty once all is read and the outbox is closed."""
        while not self._pending and not self._closed:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        data = b"".join(self._pending)
        self._pending.clear()
        self._waiting = 0
        return data

    def _wake(self) -> None:
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None


def event(json_text: str) -> bytes:
    """One server-sent event."""
    return f"data:{json_text}\n\n".encode()
