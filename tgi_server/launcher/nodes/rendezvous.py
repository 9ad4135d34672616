"""The rendezvous: launchers of several machines find each other before any of them starts a shard."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.machine import check_port, free_port
from tgi_server.launcher.nodes.peers import Kind, Link, NodeLost, Peers
from tgi_server.launcher.settings import LauncherSettings

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
REPORT_SECONDS = 10.0
# Seconds for connecting, and for the first message.
JOIN_SECONDS = 5.0


async def rendezvous(settings: LauncherSettings, shards: int) -> Peers:
    """Returns the other machines' launchers once all are there, however long that takes. shards: on this machine.

    Raises CannotStartError when this machine does not fit the others.
    """
    if settings.node_rank == 0:
        return await Rendezvous(settings, shards).wait()
    return await join(settings, shards)


class Rendezvous:
    """The part of node 0, which listens where the others can reach it, and tells them when all are there."""

    def __init__(self, settings: LauncherSettings, shards: int) -> None:
        self._settings = settings
        self._shards = shards
        self._joined: dict[int, Link] = {}
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()

    async def wait(self) -> Peers:
        """Raises CannotStartError when this machine cannot listen at its address."""
        settings = self._settings
        check_port(settings.meeting_address, settings.meeting_port, "--master-port", "--node-address")
        server = await asyncio.start_server(self._accept, settings.meeting_address, settings.meeting_port)
        try:
            async with _log_waiting(self._missing):
                while len(self._joined) < settings.num_nodes - 1:
                    self._changed.clear()
                    await self._changed.wait()
        except BaseException:
            for link in self._joined.values():
                await link.close()
            raise
        finally:
            server.close()
            for watcher in self._watchers.values():
                watcher.cancel()
            await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        port = free_port(settings.meeting_address)
        for link in self._joined.values():
            link.send(Kind.START, port=port)
        logger.info("all %d nodes have joined", settings.num_nodes)
        return Peers([self._joined[node] for node in sorted(self._joined)], port, first=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(str(writer.get_extra_info("peername")[0]), reader, writer)
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                _, message = await link.receive()
        except (NodeLost, TimeoutError):
            await link.close()
            return
        reason = self._mismatch(message)
        if reason is not None:
            logger.warning("%s was refused: %s", link.name, reason)
            link.send(Kind.REFUSED, reason=reason)
            await link.close()
            return
        node = int(message["node"])
        link.name = f"node {node} ({link.name})"
        logger.info("%s has joined", link.name)
        self._joined[node] = link
        self._watchers[node] = asyncio.create_task(self._watch(node, link))
        self._changed.set()

    async def _watch(self, node: int, link: Link) -> None:
        """Forgets a node that is lost while others are waited for."""
        try:
            while True:
                await link.receive()
        except NodeLost as error:
            logger.warning("%s", error)
            del self._joined[node]
            await link.close()

    def _mismatch(self, message: dict[str, Any]) -> str | None:
        """Returns why the node that sent this message cannot join; None when it can."""
        mine = {"nodes": self._settings.num_nodes, "shards": self._shards}
        flags = {"nodes": "--num-nodes", "shards": "--num-shard"}
        for name, value in mine.items():
            if message.get(name) != value:
                return f"{flags[name]} is {message.get(name)} there and {value} on node 0; it has to be the same"
        node = message.get("node")
        if not isinstance(node, int) or not 0 < node < self._settings.num_nodes:
            return f"--node-rank is {node}; it has to be from 1 to {self._settings.num_nodes - 1}"
        if node in self._joined:
            return f"there is a node with --node-rank {node} already, {self._joined[node].name}"
        return None

    def _missing(self) -> str:
        missing = [str(node) for node in range(1, self._settings.num_nodes) if node not in self._joined]
        return f"node {', '.join(missing)} to join at {self._settings.meeting_address}:{self._settings.meeting_port}"


async def join(settings: LauncherSettings, shards: int) -> Peers:
    """Joins node 0; the part of every other node. Raises CannotStartError when node 0 refuses this one."""
    while True:
        async with _log_waiting(lambda: f"node 0 at {settings.meeting_address}:{settings.meeting_port}"):
            link = await _connect(settings)
            link.send(Kind.JOIN, node=settings.node_rank, nodes=settings.num_nodes, shards=shards)
            try:
                kind, message = await link.receive()
            except NodeLost:
                await link.close()
                await asyncio.sleep(RETRY_SECONDS)
                continue
            except BaseException:
                await link.close()
                raise
        if kind is Kind.START:
            return Peers([link], int(message["port"]), first=False)
        await link.close()
        raise CannotStartError(f"node 0 refused this one: {message.get('reason')}")


async def _connect(settings: LauncherSettings) -> Link:
    while True:
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                return await Link.connect("node 0", settings.meeting_address, settings.meeting_port)
        except OSError as error:  # TimeoutError among them
            logger.debug("node 0 cannot be reached yet: %s", error)
            await asyncio.sleep(RETRY_SECONDS)


@asynccontextmanager
async def _log_waiting(waited_for: Callable[[], str]) -> AsyncIterator[None]:
    """Logs now and then what is waited for."""
    start = time.monotonic()

    async def report() -> None:
        while True:
            logger.info("waiting for %s (%.0f s)", waited_for(), time.monotonic() - start)
            await asyncio.sleep(REPORT_SECONDS)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
