"""Server-sent events on their way to one client."""

import asyncio

from tgi_server.router.errors import RouterError


class Outbox:
    """What is to be sent, written by the scheduler's task and read by the response. Never waits on a slow client."""

    __slots__ = ("_closed", "_pending", "_reader", "error")

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._reader: asyncio.Future[None] | None = None
        self._closed = False
        self.error: RouterError | None = None

    def write(self, data: bytes) -> None:
        self._pending.append(data)
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
        return data

    def _wake(self) -> None:
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None


def event(json_text: str) -> bytes:
    """One server-sent event."""
    return f"data:{json_text}\n\n".encode()
