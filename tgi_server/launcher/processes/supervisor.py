"""Runs shards and a router as one server: they start together, and when one ends all end."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tgi_server.launcher.errors import ProcessEndedError
from tgi_server.launcher.nodes.peers import Peers
from tgi_server.launcher.processes.child import AFTERMATH, SECOND_GUESS, Child, Command
from tgi_server.launcher.processes.health import authority, is_healthy
from tgi_server.launcher.processes.sockets import is_listening

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
REPORT_SECONDS = 10
CUT_SECONDS = 3.0
"""What the router has for ending requests that were still running when their time was over."""
FAILURE_SECONDS = 3.0
"""What processes have for ending once one of them has died: time enough to tell clients."""
SETTLE_SECONDS = 0.2
"""After a death, others of the same moment are waited for."""
AFTERMATH_SECONDS = 1.5
"""How long they are when what has died may only have missed another shard."""
SHARD_SECONDS = 7.0
"""What shards have for ending once the router has ended."""


class Supervisor:
    """One run of a server."""

    def __init__(
        self,
        shards: Sequence[Command],
        sockets: Sequence[Path],
        router: Command | None,
        address: tuple[str, int],
        graceful_termination_timeout: float,
        peers: Peers | None = None,
    ) -> None:
        """sockets: where each of the shards listens once its model is loaded.

        router: None where another machine has it. address: where it serves HTTP. graceful_termination_timeout: seconds
        that it has for finishing running requests. peers: the other machines that run the model with this one; they
        are closed in the end.
        """
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
        """Asks `run` to end all processes in order; asked a second time, it ends them at once."""
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
            self._peers.say_stop()  # the router may still need these shards, so its machine says when to end
        else:
            self._stopping.set()

    def _stop_for_peers(self) -> None:
        if not self._asked:
            self._asked = True
            logger.info("stopping, as another node says")
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
            grace, failure = self._graceful_termination_timeout + CUT_SECONDS, None
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
            deaths.append(self._peers.lost)
        await asyncio.wait([*events, *deaths], return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            if event.done():
                return event.result()
        raise await self._first_death()

    async def _first_death(self) -> BaseException:
        """When one shard dies others fail soon after it, here and elsewhere. The one with which it began is named."""
        await asyncio.sleep(SETTLE_SECONDS)
        deadline = time.monotonic() + AFTERMATH_SECONDS
        while time.monotonic() < deadline:
            if self._lost or self._first_dead_child().suspicion()[0] != AFTERMATH:
                break
            await asyncio.sleep(POLL_SECONDS)
        if self._peers is not None and self._lost:
            elsewhere = SECOND_GUESS, self._peers.lost_at
            if not self._any_dead or elsewhere < self._first_dead_child().suspicion():
                return self._peers.lost.exception() or ProcessEndedError("another node has gone")
        return ProcessEndedError(self._first_dead_child().epitaph())

    @property
    def _lost(self) -> bool:
        return self._peers is not None and self._peers.lost.done()

    @property
    def _any_dead(self) -> bool:
        return any(child.ended.done() for child in self._children)

    def _first_dead_child(self) -> Child:
        return min((child for child in self._children if child.ended.done()), key=Child.suspicion)

    async def _ready(self) -> None:
        """Returns when the router serves. Says now and then what it is waiting for."""
        start = time.monotonic()
        report = start + REPORT_SECONDS
        waiting = dict(zip((shard.name for shard in self._shards), self._sockets, strict=True))
        while waiting or (self._router is not None and not await is_healthy(*self._address)):
            await asyncio.sleep(POLL_SECONDS)
            waiting = {name: socket for name, socket in waiting.items() if not is_listening(socket)}
            if time.monotonic() > report:
                names = ", ".join(waiting) or "router"
                logger.info("waiting for %s (%d s)", names, time.monotonic() - start)
                report += REPORT_SECONDS
        seconds = time.monotonic() - start
        if self._router is None:
            names = ", ".join(shard.name for shard in self._shards)
            logger.info("ready after %.1f s: %s; node 0 serves HTTP", seconds, names)
        else:
            logger.info("ready on http://%s after %.1f s", authority(*self._address), seconds)

    async def _until_stopped(self) -> None:
        await self._stopping.wait()

    async def _stop(self, grace: float, failure: str | None) -> None:
        if self._peers is not None and failure is not None:
            self._peers.say_failed(failure)
        shards = self._children[: len(self._shards)]
        for router in self._children[len(self._shards) :]:
            await router.stop(grace)
        if self._peers is not None and failure is None:
            self._peers.say_stop()
        await asyncio.gather(*(shard.stop(min(grace, SHARD_SECONDS)) for shard in shards))
        if self._peers is not None:
            await self._peers.close()
