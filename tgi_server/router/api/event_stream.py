"""Streams of server-sent events or lines: the buffer of a response, the end of a stream, and the response itself."""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tgi_server.router.api.connections import REFUSE, WATCH
from tgi_server.router.api.encoding import EVENTS, error_event
from tgi_server.router.errors import ClientGone, RouterError, SlowReader

# A comment, which clients skip. It is sent because proxies close idle connections.
_COMMENT = b":\n\n"
_KEEP_ALIVE_SECONDS = 15.0
# Maximum bytes that wait for a client: some thousand tokens, or a few of the largest events so far.
_LARGEST_BACKLOG = 2**20
_LARGEST_EVENTS = 4


class Outbox:
    """The buffer of one response's events: the scheduler's task writes them, the response's task sends them.

    Writing never waits for a slow client: the stream is abandoned when too many bytes are waiting.

    on_overrun: called then; it has to end the connection. waiting: number of bytes that have not been sent. keep_alive:
    bytes that are sent while the answer makes no progress.
    """

    __slots__ = ("_closed", "_most", "_pending", "_reader", "_sending", "error", "keep_alive", "on_overrun", "waiting")

    def __init__(self, keep_alive: bytes = _COMMENT) -> None:
        """keep_alive: in the form that the route's clients expect."""
        self.keep_alive = keep_alive
        self._pending: list[bytes] = []
        self.waiting = self._sending = 0
        self._most = _LARGEST_BACKLOG
        self._reader: asyncio.Future[None] | None = None
        self._closed = False
        self.error: RouterError | None = None
        self.on_overrun: Callable[[], None] | None = None

    def write(self, data: bytes) -> None:
        if self._closed or not data:
            return
        self._most = max(self._most, _LARGEST_EVENTS * len(data))
        if self.waiting > self._most:
            self.abandon(SlowReader(f"the client left {self.waiting} bytes of its answer unread"))
            if self.on_overrun is not None:
                self.on_overrun()
            return
        self._pending.append(data)
        self.waiting += len(data)
        self._wake()

    def close(self, error: RouterError | None = None) -> None:
        """Ends the stream; later writes are ignored. error: the reason if it did not end normally."""
        if not self._closed:
            self._closed, self.error = True, error
            self._wake()

    def abandon(self, error: RouterError) -> None:
        """Ends the stream and drops what has not been sent, because the client is gone."""
        self._pending.clear()
        self.close(error)

    async def read(self) -> bytes:
        """Waits for data, and returns everything written since the last call. Empty: the stream has ended.

        The data of the last call counts as sent.
        """
        self.waiting -= self._sending
        self._sending = 0
        while not self._pending and not self._closed:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        data = b"".join(self._pending)
        self._pending.clear()
        self._sending = len(data)
        return data

    def _wake(self) -> None:
        if self._reader is not None:
            if not self._reader.done():
                self._reader.set_result(None)
            self._reader = None


class StreamEnd:
    """Called at the end of each sequence of a stream. Ends the stream after the last one, or the first failure.

    release: called as soon as nothing more is generated. sequences: number of sequences.
    last_words: returns events that are sent before a stream ends normally, such as the usage.
    trailer: sent at the end in any case.
    """

    def __init__(
        self,
        outbox: Outbox,
        path: str,
        release: Callable[[], None],
        sequences: int,
        last_words: Callable[[], bytes],
        trailer: bytes,
    ) -> None:
        self._outbox = outbox
        self._path = path
        self._release = release
        self._open = sequences
        self._last_words = last_words
        self._trailer = trailer

    def __call__(self, error: RouterError | None) -> None:
        if error is not None:
            self._outbox.write(error_event(error, self._path) + self._trailer)
            self._outbox.close(error)
            self._release()
            return
        self._open -= 1
        if not self._open:
            self._outbox.write(self._last_words() + self._trailer)
            self._outbox.close()
            self._release()


class EventStream(Response):
    """A response that sends what is written into `outbox` until that is closed, or the client is gone.

    on_close: called once, with the error if the stream did not end normally, else None.
    """

    def __init__(
        self,
        outbox: Outbox,
        headers: dict[str, str],
        on_close: Callable[[BaseException | None], None],
        media_type: str = EVENTS,
    ) -> None:
        self.media_type = media_type
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._outbox = outbox
        self._on_close = on_close
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outbox.on_overrun = scope["state"][REFUSE]
        watch = scope["state"][WATCH]
        watch(lambda: self._outbox.abandon(ClientGone("the client disconnected")))
        timer = asyncio.ensure_future(self._keep_alive())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while data := await self._outbox.read():
                self._sent_at = asyncio.get_running_loop().time()
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except BaseException as error:
            self._outbox.abandon(ClientGone("the stream was aborted"))
            self._on_close(error)
            raise
        finally:
            watch(None)
            timer.cancel()
        self._on_close(self._outbox.error)

    async def _keep_alive(self) -> None:
        """Writes `keep_alive` whenever nothing has been sent for `_KEEP_ALIVE_SECONDS`."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        while True:
            await asyncio.sleep(self._sent_at + _KEEP_ALIVE_SECONDS - loop.time())
            if loop.time() >= self._sent_at + _KEEP_ALIVE_SECONDS:
                self._sent_at = loop.time()
                if not self._outbox.waiting:
                    self._outbox.write(self._outbox.keep_alive)
