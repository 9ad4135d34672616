"""The launchers of the other machines, and the messages between them."""

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

from tgi_server.launcher.errors import ProcessEndedError

# Seconds between two heartbeats.
HEARTBEAT_SECONDS = 1.0
# A peer from which nothing came for so many seconds is lost: its power may have failed, or the network.
SILENCE_SECONDS = 5.0
MAX_LINE = 65536


class Kind(StrEnum):
    """Kinds of messages between launchers; on the wire, the field `word`."""

    # From a node to node 0: the node is ready to start its shards.
    JOIN = "join"
    # From node 0: the node does not fit, and the reason.
    REFUSED = "refused"
    # From node 0, once all have joined: the port at which the shards meet.
    START = "start"
    HEARTBEAT = "alive"
    # To node 0: the user asked a node to stop. From node 0: all requests are done, so the shards may end.
    STOP = "stop"
    # A process died; the field `reason` names it.
    FAILED = "failed"


class NodeLost(Exception):
    """The launcher at the other end is gone, or does not speak this protocol."""


class Link:
    """One end of a connection between two launchers. Messages are JSON objects, a line each."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """name: the name of the other end, for log lines and errors."""
        self.name = name
        self._reader = reader
        self._writer = writer
        self._heartbeat = asyncio.create_task(self._send_heartbeats())

    @classmethod
    async def connect(cls, name: str, host: str, port: int) -> "Link":
        """Connects to a listening launcher. Raises OSError."""
        return cls(name, *await asyncio.open_connection(host, port, limit=MAX_LINE))

    def send(self, kind: Kind, **details: Any) -> None:
        """Sends a message without waiting for it to arrive."""
        if not self._writer.is_closing():
            self._writer.write(json.dumps({"word": kind, **details}).encode() + b"\n")

    async def receive(self) -> tuple[Kind, dict[str, Any]]:
        """Returns the next message that is no heartbeat, and its fields. Raises NodeLost."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    line = await self._reader.readline()
                if not line:
                    raise NodeLost(f"{self.name} closed its connection")
                message: dict[str, Any] = json.loads(line)
                kind = Kind(message["word"])
                if kind is not Kind.HEARTBEAT:
                    return kind, message
            except TimeoutError as error:
                raise NodeLost(f"{self.name} has sent nothing for {SILENCE_SECONDS:.0f} s") from error
            except OSError as error:
                raise NodeLost(f"{self.name} cannot be reached any more: {error.strerror or error}") from error
            except (ValueError, KeyError, TypeError) as error:
                raise NodeLost(
                    f"{self.name} sent no message of a launcher; start the same version on all machines"
                ) from error

    async def close(self) -> None:
        """Closes the connection; what was sent before still arrives."""
        self._heartbeat.cancel()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                await self._writer.wait_closed()

    async def _send_heartbeats(self) -> None:
        while True:
            self.send(Kind.HEARTBEAT)
            await asyncio.sleep(HEARTBEAT_SECONDS)


class Peers:
    """The other launchers, once all have met. Node 0 has a link to each; each has one to node 0, which passes on
    failures."""

    def __init__(self, links: Sequence[Link], store_port: int, *, first: bool) -> None:
        """store_port: where the shards of all nodes meet, on node 0. first: True on node 0."""
        self.store_port = store_port
        self.first = first
        # Raises ProcessEndedError as soon as another node has failed.
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed_at = math.inf  # on the monotonic clock, seconds
        self._links = links
        self._on_stop: Callable[[], None] | None = None
        self._listeners = [asyncio.create_task(self._listen(link)) for link in links]

    def on_stop(self, action: Callable[[], None]) -> None:
        """Sets what is called when another node passes on that the server is to stop."""
        self._on_stop = action

    def send_stop(self) -> None:
        for link in self._links:
            link.send(Kind.STOP)

    def send_failed(self, reason: str) -> None:
        """Tells the other nodes which process died, on this node or on another one."""
        for link in self._links:
            link.send(Kind.FAILED, reason=reason)

    async def close(self) -> None:
        for listener in self._listeners:
            listener.cancel()
        await asyncio.gather(*(link.close() for link in self._links))
        if not self.failure.done():
            self.failure.cancel()
        elif not self.failure.cancelled():
            self.failure.exception()  # retrieved, or asyncio would log that nobody did

    async def _listen(self, link: Link) -> None:
        try:
            while True:
                kind, message = await link.receive()
                if kind is Kind.FAILED:
                    reason = str(message.get("reason"))
                    self._fail(reason if reason.startswith("node ") else f"{link.name}: {reason}")
                elif kind is Kind.STOP:
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
