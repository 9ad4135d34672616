"""One client's connection."""

import asyncio
import socket
from collections.abc import Callable, Iterable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_LARGEST_HEAD = 65_536
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"

BREAK_OFF = "break_off"
"""In the state of a request's scope: ends the connection at once, whatever is still to be sent."""


class ClientConnection(HttpToolsProtocol):
    """Is broken off by the server when the client does not do its part in time: begin a request, send it to its end, or
    take what is sent. Each has one deadline, which bytes that trickle in or out do not put off.

    turn_began: when the server began to wait for the client. receiving: a request has begun, or is the first.
    on_lost: called once the connection is no more.
    """

    on_lost: Callable[[], None] | None = None
    turn_began = 0.0
    receiving = True
    _in_head = True
    _head_bytes = 0
    _deadline: asyncio.TimerHandle | None = None
    _reading_deadline: asyncio.TimerHandle | None = None

    @property
    def unread(self) -> int:
        """Bytes that wait for the client to take them."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    @property
    def may_give_way(self) -> bool:
        """True while the server waits for the client, and for nothing else."""
        if self.transport is None or self.transport.is_closing() or self.pipeline:
            return False
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def break_off(self) -> None:
        """Ends the connection; what has not been sent is dropped."""
        if self.unread:
            self.transport.abort()
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        self._is_read()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > _LARGEST_HEAD and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][BREAK_OFF] = self.break_off
        self.receiving = self._in_head = True
        self._wait()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.receiving = False
        self._in_head = True
        self._head_bytes = 0
        self._wait_no_more()
        self._wait_for_next()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_next()

    def pause_writing(self) -> None:
        """The client is behind by more than the transport's high-water mark."""
        super().pause_writing()
        if self._reading_deadline is None:
            self._reading_deadline = self.loop.call_later(self.timeout_keep_alive, self.break_off)

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def _wait_for_next(self) -> None:
        """Begins to wait for the next request if the last one has come and been answered."""
        if not self.receiving and self.cycle.response_complete:
            self._wait()

    def _is_read(self) -> None:
        if self._reading_deadline is not None:
            self._reading_deadline.cancel()
            self._reading_deadline = None

    def _wait(self) -> None:
        self._wait_no_more()
        self.turn_began = self.loop.time()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._out_of_time)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _out_of_time(self) -> None:
        if self.flow.read_paused:  # the wait is the server's doing
            self._wait()
        else:
            self.break_off()


def bound_silence(listeners: Iterable[socket.socket], seconds: int) -> None:
    """Has the system break off connections, taken from now on, whose client takes nothing of what is sent for so long.

    Only Linux can tell; it passes a listener's options on to its connections.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        for listener in listeners:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
