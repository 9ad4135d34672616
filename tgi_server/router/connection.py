"""One client's connection."""

import asyncio
import socket
from collections.abc import Iterable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LARGEST_HEAD = 65_536
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class ClientConnection(HttpToolsProtocol):
    """Is broken off by the server when the client is silent before its request is complete, or the request's head
    has no end. Silence after an answer ends it too; that is uvicorn's own doing, after the same time.
    """

    _head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._receiving = self._in_head = True
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._wait_no_more()
        self._head_bytes += len(data)
        super().data_received(data)
        if self._receiving and not self.transport.is_closing():
            self._wait()
            if self._in_head and self._head_bytes > _LARGEST_HEAD:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = self._in_head = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._receiving = False
        self._head_bytes = 0

    def _wait(self) -> None:
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._break_off)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _break_off(self) -> None:
        if self.flow.read_paused:  # the silence is the server's
            self._wait()
        else:
            self.transport.abort()


def bound_silence(listeners: Iterable[socket.socket], seconds: int) -> None:
    """Has the system break off connections, taken from now on, whose client takes nothing of what is sent for so long.

    Only Linux can tell; it passes a listener's options on to its connections.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        for listener in listeners:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
