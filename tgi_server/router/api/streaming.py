"""Answers that come as server-sent events."""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tgi_server.router.api.answers import EVENTS, error_text
from tgi_server.router.api.outbox import Outbox, event
from tgi_server.router.connection import BREAK_OFF
from tgi_server.router.errors import ClientGone, RouterError

# A comment, which clients skip: proxies close connections on which nothing moves.
_KEEP_ALIVE = b":\n\n"
_KEEP_ALIVE_SECONDS = 15.0


class StreamEnd:
    """Told of the end of each sequence of one stream; ends the stream after the last one, or the first failure.

    release: called as soon as nothing more is to be generated.
    last_words: called before the stream ends as it should, for events that sum it up.
    trailer: sent in any case.
    """

    def __init__(
        self,
        outbox: Outbox,
        path: str,
        release: Callable[[], None],
        *,
        sequences: int = 1,
        last_words: Callable[[], bytes] | None = None,
        trailer: bytes = b"",
    ) -> None:
        self._outbox = outbox
        self._path = path
        self._release = release
        self._open = sequences
        self._last_words = last_words
        self._trailer = trailer

    def __call__(self, error: RouterError | None) -> None:
        if error is not None:
            self._outbox.write(event(error_text(error, self._path)) + self._trailer)
            self._outbox.close(error)
            self._release()
            return
        self._open -= 1
        if not self._open:
            self._outbox.write((self._last_words() if self._last_words else b"") + self._trailer)
            self._outbox.close()
            self._release()


class EventStream(Response):
    """Sends what is written into `outbox` until it is closed, or the client is gone.

    on_close: called once, with the reason if the stream did not end as it should.
    """

    media_type = EVENTS

    def __init__(
        self, outbox: Outbox, headers: dict[str, str], on_close: Callable[[BaseException | None], None]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**headers, "cache-control": "no-cache", "x-accel-buffering": "no"})
        self._outbox = outbox
        self._on_close = on_close
        self._idle = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._outbox.on_overrun = scope["state"][BREAK_OFF]
        watcher = asyncio.ensure_future(self._watch(receive))
        timer = asyncio.ensure_future(self._keep_alive())
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while data := await self._outbox.read():
                self._idle = False
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except BaseException as error:
            self._outbox.abandon(ClientGone("the stream was broken off"))
            self._on_close(error)
            raise
        finally:
            watcher.cancel()
            timer.cancel()
        self._on_close(self._outbox.error)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._outbox.abandon(ClientGone("the client left"))

    async def _keep_alive(self) -> None:
        while True:
            self._idle = True
            await asyncio.sleep(_KEEP_ALIVE_SECONDS)
            if self._idle:
                self._outbox.write(_KEEP_ALIVE)
