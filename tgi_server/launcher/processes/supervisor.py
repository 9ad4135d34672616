"""Runs shards and a router as one server: they start together, and when one ends all end."""

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tgi_server.launcher.errors import ProcessEndedError
from tgi_server.launcher.machine import authority
from tgi_server.launcher.processes.child import ENDED_BY_ITSELF, LOST_A_PEER, Child, Command
from tgi_server.launcher.processes.sockets import is_listening, router_socket
from tgi_server.loading import read_progress

if TYPE_CHECKING:
    from tgi_server.launcher.nodes.peers import Peers  # imports gRPC, which one machine alone does not need

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
REPORT_SECONDS = 10
# Seconds that the router has, after the drain, for aborting requests that still run.
ABORT_SECONDS = 3.0
# Seconds that processes have to end once one of them has died: enough for error responses to clients.
FAILURE_SECONDS = 3.0
# Seconds to wait, after a process has died, for others that die at the same time; the second number is for a process
# that may have ended only because it lost a peer.
SETTLE_SECONDS = 0.2
LOST_PEER_SECONDS = 1.5
# Seconds that shards have for ending once the router has ended.
SHARD_SECONDS = 7.0
# Characters of the progress bar, and of the stage's name beside it.
_BAR_WIDTH, _STAGE_WIDTH = 20, 16


class Supervisor:
    """Runs a server once: starts its processes, drains and stops them."""

    def __init__(
        self,
        shards: Sequence[Command],
        sockets: Sequence[Path],
        router: Command | None,
        address: tuple[str, int],
        graceful_termination_timeout: float,
        peers: "Peers | None" = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """sockets: where each of the shards listens once its model is loaded.

        router: None where another machine has it. address: host and port that it listens on.
        graceful_termination_timeout: seconds that it has for draining, that is, for finishing running requests. peers:
        the launchers of the other machines that run the model with this one; they are closed in the end.
        on_ready: called once, when the router serves HTTP.
        """
        self._on_ready = on_ready
        self._shards = shards
        self._sockets = sockets
        self._router = router
        self._address = address
        self._graceful_termination_timeout = graceful_termination_timeout
        self._peers = peers
        self._asked = False
        self._stopping = asyncio.Event()
        self._children: list[Child] = []
        if peers is not None:
            peers.on_stop(self._stop_for_peers)

    def stop(self) -> None:
        """Makes `run` end all processes in order; a second call makes it end them at once."""
        if self._asked:
            self._stopping.set()
            for child in self._children:
                child.kill()
            return
        self._asked = True
        logger.info(
            "stopping; running requests have %d s to finish, a second signal ends them at once",
            self._graceful_termination_timeout,
        )
        if self._peers is not None and not self._peers.first:
            self._peers.send_stop()  # the router may still need these shards, so its machine says when to end
        else:
            self._stopping.set()

    def _stop_for_peers(self) -> None:
        if not self._asked:
            self._asked = True
            logger.info("stopping, because another node stops")
        self._stopping.set()

    async def run(self) -> None:
        """Returns when everything has ended because `stop` was called.

        Raises ProcessEndedError, once all others have been stopped, when a process ends by itself.
        """
        stopping = asyncio.create_task(self._until_stopped())
        grace = FAILURE_SECONDS
        failure: str | None = "its launcher failed"
        try:
            # The router loads its tokenizer while the shards load the model, then waits for their sockets.
            for command in (*self._shards, *([self._router] if self._router else [])):
                self._children.append(await Child.start(command))
            ready = asyncio.create_task(self._ready())
            await self._all_alive_until(ready, stopping)
            ready.cancel()
            await self._all_alive_until(stopping)
            grace, failure = self._graceful_termination_timeout + ABORT_SECONDS, None
        except ProcessEndedError as error:
            failure = str(error)
            raise
        finally:
            stopping.cancel()
            await self._stop(grace, failure)

    async def _all_alive_until(self, *events: asyncio.Task[None]) -> None:
        """Returns when one of `events` is done. Raises ProcessEndedError when a child, or another node, ends before."""
        deaths: list[asyncio.Future[Any]] = [child.ended for child in self._children]
        if self._peers is not None:
            deaths.append(self._peers.failure)
        await asyncio.wait([*events, *deaths], return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            if event.done():
                return event.result()
        raise await self._first_death()

    async def _first_death(self) -> BaseException:
        """Returns the error of the process whose death caused the others.

        When one shard dies, others fail soon after it, on this node and on others.
        """
        first = await first_dead(self._children, lambda: self._peer_failed)
        if self._peers is not None and self._peer_failed:
            elsewhere = ENDED_BY_ITSELF, self._peers.failed_at
            if first is None or elsewhere < first.cause_rank():
                return self._peers.failure.exception() or ProcessEndedError("another node has ended")
        assert first is not None
        return ProcessEndedError(first.exit_message())

    @property
    def _peer_failed(self) -> bool:
        return self._peers is not None and self._peers.failure.done()

    async def _ready(self) -> None:
        """Returns when the router reports that it serves. Logs at intervals what is waited for.

        An answer on its port may be from another server, which had the port first.
        """
        start = time.monotonic()
        report = start + REPORT_SECONDS
        bar = LoadingBar(sys.stderr)
        waiting = dict(zip((shard.name for shard in self._shards), self._sockets, strict=True))
        while waiting or (self._router is not None and not is_listening(router_socket(self._sockets[0]))):
            await asyncio.sleep(POLL_SECONDS)
            waiting = {name: socket for name, socket in waiting.items() if not is_listening(socket)}
            percent, stage = read_progress(self._sockets[0])
            bar.show(percent, stage)
            if time.monotonic() > report:
                names = ", ".join(waiting) or "router"
                logger.info(
                    "loading: %d %%, %s (%d s); waiting for %s", percent, stage, time.monotonic() - start, names
                )
                report = time.monotonic() + REPORT_SECONDS
        bar.clear()
        seconds = time.monotonic() - start
        if self._router is None:
            names = ", ".join(shard.name for shard in self._shards)
            logger.info("ready after %.1f s: %s; node 0 serves HTTP", seconds, names)
        else:
            logger.info("ready on http://%s after %.1f s", authority(*self._address), seconds)
            if self._on_ready is not None:
                self._on_ready()

    async def _until_stopped(self) -> None:
        await self._stopping.wait()

    async def _stop(self, grace: float, failure: str | None) -> None:
        """Ends the router, then the shards. failure: the reason for the other nodes; None: no process has died."""
        if self._peers is not None and failure is not None:
            self._peers.send_failed(failure)
        shards = self._children[: len(self._shards)]
        for router in self._children[len(self._shards) :]:
            await router.stop(grace)
        if self._peers is not None and failure is None:
            self._peers.send_stop()
        await asyncio.gather(*(shard.stop(min(grace, SHARD_SECONDS)) for shard in shards))
        for child in self._children:
            if child.log.has_failed and (message := child.exit_message()) != failure:
                logger.warning("%s", message)
        if self._peers is not None:
            await self._peers.close()


async def first_dead(children: Sequence[Child], is_explained: Callable[[], bool] = lambda: False) -> Child | None:
    """Returns the child whose death caused the others of the same moment; None if none is dead.

    is_explained: returns True if the cause is elsewhere, so that no other death need be waited for.
    """
    await asyncio.sleep(SETTLE_SECONDS)
    deadline = time.monotonic() + LOST_PEER_SECONDS
    while True:
        first = min((child for child in children if child.ended.done()), key=Child.cause_rank, default=None)
        lost_a_peer = first is not None and first.cause_rank()[0] == LOST_A_PEER
        if is_explained() or not lost_a_peer or time.monotonic() > deadline:
            return first
        await asyncio.sleep(POLL_SECONDS)


class LoadingBar:
    """A progress bar on the last line of a terminal; shows nothing on other outputs.

    The cursor stays at the line's beginning, so a log line, which is longer, overwrites the bar. The bar is redrawn at
    intervals, on the line below.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._on_terminal = output.isatty()

    def show(self, percent: int, stage: str) -> None:
        done = percent * _BAR_WIDTH // 100
        self._write(f"[{'#' * done}{'.' * (_BAR_WIDTH - done)}] {percent:3} % {stage:{_STAGE_WIDTH}}")

    def clear(self) -> None:
        self._write(" " * (_BAR_WIDTH + len("[] 100 % ") + _STAGE_WIDTH))

    def _write(self, text: str) -> None:
        if self._on_terminal:
            self._output.write(f"{text}\r")
            self._output.flush()
