"""The rendezvous: launchers of several machines find each other before any of them starts a shard."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import unquote

import grpc

from shared.addresses import free_port
from shared.stubs.generate_pb2 import LauncherMessage, NodeJoin
from shared.stubs.generate_pb2_grpc import (
    LauncherServiceServicer,
    LauncherServiceStub,
    add_LauncherServiceServicer_to_server,
)
from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.machine import authority, check_port
from tgi_server.launcher.nodes.peers import CLOSE_SECONDS, OPTIONS, Link, NodeLost, Peers
from tgi_server.launcher.settings import LauncherSettings

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
REPORT_SECONDS = 10.0
# Seconds for the first message.
JOIN_SECONDS = 5.0


async def rendezvous(settings: LauncherSettings, shards: int) -> Peers:
    """Returns the other machines' launchers once all have joined; waits without limit. shards: number on this machine.

    Raises CannotStartError when the settings of this machine do not fit the others.
    """
    if settings.node_rank == 0:
        return await Rendezvous(settings, shards).wait()
    return await join(settings, shards)


class Rendezvous(LauncherServiceServicer):
    """The part of node 0, which listens where the others can reach it, and notifies them when all have joined."""

    def __init__(self, settings: LauncherSettings, shards: int) -> None:
        self._settings = settings
        self._shards = shards
        self._joined: dict[int, Link] = {}
        self._complete = False
        self._changed = asyncio.Event()

    async def wait(self) -> Peers:
        """Raises CannotStartError when this machine cannot listen at its address."""
        settings = self._settings
        check_port(settings.meeting_address, settings.meeting_port, "--master-port", "--node-address")
        server = grpc.aio.server(options=OPTIONS)
        add_LauncherServiceServicer_to_server(self, server)
        server.add_insecure_port(_authority(settings))
        await server.start()
        try:
            async with _log_waiting(self._missing):
                while len(self._joined) < settings.num_nodes - 1:
                    self._changed.clear()
                    await self._changed.wait()
        except BaseException:
            await server.stop(None)
            raise
        self._complete = True
        port = free_port(settings.meeting_address)
        for link in self._joined.values():
            link.send(LauncherMessage(start=port))
        logger.info("all %d nodes have joined", settings.num_nodes)
        return Peers([self._joined[node] for node in sorted(self._joined)], port, server.stop, first=True)

    async def Join(self, _: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[LauncherMessage]:  # noqa: N802
        link = Link(_host(context.peer()))
        link.read = context.read
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                node = (await link.receive()).join
        except (NodeLost, TimeoutError):
            return
        if reason := self._mismatch(node):
            logger.warning("%s was refused: %s", link.name, reason)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        link.name = f"node {node.node} ({link.name})"
        logger.info("%s has joined", link.name)
        self._joined[node.node] = link
        self._changed.set()
        try:
            async for message in link.outgoing():
                yield message
        finally:
            if not self._complete:  # others are waited for, and this one is lost
                logger.warning("lost the connection to %s", link.name)
                del self._joined[node.node]

    def _mismatch(self, there: NodeJoin) -> str | None:
        """Returns why the node that sent this message cannot join; None when it can."""
        here = self._settings
        for flag, theirs, ours in (
            ("--num-nodes", there.nodes, here.num_nodes),
            ("--num-shard", there.shards, self._shards),
        ):
            if theirs != ours:
                return f"{flag} is {theirs} there and {ours} on node 0; it must be the same"
        if not 0 < there.node < here.num_nodes:
            return f"--node-rank is {there.node}; it must be from 1 to {here.num_nodes - 1}"
        if there.node in self._joined:
            return f"there is a node with --node-rank {there.node} already, {self._joined[there.node].name}"
        return None

    def _missing(self) -> str:
        missing = [str(node) for node in range(1, self._settings.num_nodes) if node not in self._joined]
        return f"node {', '.join(missing)} to join at {_authority(self._settings)}"


async def join(settings: LauncherSettings, shards: int) -> Peers:
    """Joins node 0; the part of every other node. Raises CannotStartError when node 0 refuses this one."""
    channel = grpc.aio.insecure_channel(_authority(settings), OPTIONS)
    node = NodeJoin(node=settings.node_rank, nodes=settings.num_nodes, shards=shards)
    try:
        async with _log_waiting(lambda: f"node 0 at {_authority(settings)}"):
            while True:
                link = Link("node 0")
                link.send(LauncherMessage(join=node))
                call = LauncherServiceStub(channel).Join(link.outgoing(), wait_for_ready=True)
                link.read = call.read
                try:
                    message = await link.receive()
                    return Peers([link], message.start, channel.close, first=False)
                except NodeLost:
                    if await call.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNIMPLEMENTED):
                        raise CannotStartError(f"node 0 refused this one: {await call.details()}") from None
                    await asyncio.sleep(RETRY_SECONDS)
    except BaseException:
        await channel.close(CLOSE_SECONDS)
        raise


def _authority(settings: LauncherSettings) -> str:
    return authority(settings.meeting_address, settings.meeting_port)


def _host(peer: str) -> str:
    """Returns the address in gRPC's name of a peer, such as `ipv4:10.0.0.2:5000`."""
    return unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")


@asynccontextmanager
async def _log_waiting(waited_for: Callable[[], str]) -> AsyncIterator[None]:
    """Logs at intervals what is waited for."""
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
