"""The launchers of the other machines, and the streams of messages between them (LauncherService in generate.proto)."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import grpc

from shared.stubs.generate_pb2 import LauncherMessage
from tgi_server.launcher.errors import ProcessEndedError

# A peer that does not acknowledge a ping within this time is lost: its power or the network may have failed.
PING_SECONDS, SILENCE_SECONDS = 1.0, 4.0
# Seconds within which the last messages still arrive.
CLOSE_SECONDS = 1.0
OPTIONS = (
    ("grpc.keepalive_time_ms", int(PING_SECONDS * 1000)),
    ("grpc.keepalive_timeout_ms", int(SILENCE_SECONDS * 1000)),
    ("grpc.http2.max_pings_without_data", 0),  # any number
    ("grpc.http2.min_ping_interval_without_data_ms", int(PING_SECONDS * 500)),
    ("grpc.initial_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 65536),
    ("grpc.so_reuseport", 0),
    ("grpc.enable_http_proxy", 0),
)


class NodeLost(Exception):
    """The launcher at the other end is gone."""


class Link:
    """One end of the stream between two launchers. read: the method of the call, once there is one."""

    read: Callable[[], Awaitable[object]]

    def __init__(self, name: str) -> None:
        """name: the name of the other end, for log lines and errors."""
        self.name = name
        self._outgoing: asyncio.Queue[LauncherMessage | None] = asyncio.Queue()

    async def outgoing(self) -> AsyncIterator[LauncherMessage]:
        """Yields the messages to send, until the link is closed."""
        while (message := await self._outgoing.get()) is not None:
            yield message

    def send(self, message: LauncherMessage) -> None:
        """Sends a message without waiting for it to arrive."""
        self._outgoing.put_nowait(message)

    async def receive(self) -> LauncherMessage:
        """Returns the next message. Raises NodeLost."""
        try:
            message = await self.read()
        except (grpc.RpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            message = grpc.aio.EOF
        if isinstance(message, LauncherMessage):
            return message
        raise NodeLost(f"lost the connection to {self.name}")

    def close(self) -> None:
        """Ends the stream of messages to the other end."""
        self._outgoing.put_nowait(None)


class Peers:
    """The other launchers, once all have met. Node 0 has a link to each; each has one to node 0, which passes on
    failures."""

    def __init__(
        self, links: Sequence[Link], store_port: int, close: Callable[[float], Awaitable[None]], *, first: bool
    ) -> None:
        """store_port: where the shards of all nodes meet, on node 0. first: True on node 0.

        close: ends node 0's server, or the channel to it, within a number of seconds.
        """
        self.store_port = store_port
        self.first = first
        # Raises ProcessEndedError as soon as another node has failed.
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed_at = math.inf  # on the monotonic clock, seconds
        self._links = links
        self._close = close
        self._on_stop: Callable[[], None] | None = None
        self._listeners = [asyncio.create_task(self._listen(link)) for link in links]

    def on_stop(self, action: Callable[[], None]) -> None:
        """Sets the function that is called when another node reports that the server is to stop."""
        self._on_stop = action

    def send_stop(self) -> None:
        for link in self._links:
            link.send(LauncherMessage(stop=True))

    def send_failed(self, reason: str) -> None:
        """Tells the other nodes which process died, on this node or on another one."""
        for link in self._links:
            link.send(LauncherMessage(failed=reason))

    async def close(self) -> None:
        for listener in self._listeners:
            listener.cancel()
        for link in self._links:
            link.close()
        await self._close(CLOSE_SECONDS)
        if not self.failure.done():
            self.failure.cancel()
        elif not self.failure.cancelled():
            self.failure.exception()  # retrieved, or asyncio would log that it was not

    async def _listen(self, link: Link) -> None:
        try:
            while True:
                message = await link.receive()
                if message.HasField("failed"):
                    reason = message.failed
                    self._fail(reason if reason.startswith("node ") else f"{link.name}: {reason}")
                elif message.HasField("stop"):
                    self._stop()
                    if not self.first:
                        return  # node 0 closes its end after that
        except NodeLost as error:
            self._fail(str(error))

    def _stop(self) -> None:
        if self._on_stop is None:
            self._fail("another node was stopped while the server started")
        else:
            self._on_stop()

    def _fail(self, reason: str) -> None:
        if not self.failure.done():
            self.failed_at = time.monotonic()
            self.failure.set_exception(ProcessEndedError(reason))
