"""Runs shards and a router as one server: they start together, and when one ends all end."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from tgi_server.launcher.errors import ProcessEndedError
from tgi_server.launcher.processes.child import Child, Command
from tgi_server.launcher.processes.health import authority, is_healthy
from tgi_server.launcher.processes.sockets import is_listening

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.05
REPORT_SECONDS = 10
CUT_SECONDS = 3.0
"""What the router has for ending requests that were still running when their time was over."""
FAILURE_SECONDS = 3.0
"""What processes have for ending once one of them has died: time enough to tell clients."""
SHARD_SECONDS = 7.0
"""What shards have for ending once the router has ended."""


class Supervisor:
    """One run of a server."""

    def __init__(
        self,
        shards: Sequence[Command],
        sockets: Sequence[Path],
        router: Command,
        address: tuple[str, int],
        graceful_termination_timeout: float,
    ) -> None:
        """sockets: where each of the shards listens once its model is loaded.

        address: where the router serves HTTP. graceful_termination_timeout: seconds that the router has for
        finishing running requests.
        """
        self._shards = shards
        self._sockets = sockets
        self._router = router
        self._address = address
        self._graceful_termination_timeout = graceful_termination_timeout
        self._stopping = asyncio.Event()
        self._children: list[Child] = []

    def stop(self) -> None:
        """Asks `run` to end all processes in order; asked a second time, it ends them at once."""
        if self._stopping.is_set():
            for child in self._children:
                child.kill()
            return
        logger.info(
            "stopping; running requests have %d s to finish, a second signal ends them at once",
            self._graceful_termination_timeout,
        )
        self._stopping.set()

    async def run(self) -> None:
        """Returns when everything has ended because `stop` was called.

        Raises ProcessEndedError, once all others have been stopped, when a process ends by itself.
        """
        stopping = asyncio.create_task(self._until_stopped())
        grace = FAILURE_SECONDS
        try:
            # The router loads its tokenizer while the shards load the model, then waits for their sockets.
            for command in (*self._shards, self._router):
                self._children.append(await Child.start(command))
            ready = asyncio.create_task(self._ready())
            await self._all_alive_until(ready, stopping)
            ready.cancel()
            await self._all_alive_until(stopping)
            grace = self._graceful_termination_timeout + CUT_SECONDS
        finally:
            stopping.cancel()
            await self._stop(grace)

    async def _all_alive_until(self, *events: asyncio.Task[None]) -> None:
        """Returns when one of `events` is done. Raises ProcessEndedError when a child ends before that."""
        await asyncio.wait([*events, *(child.ended for child in self._children)], return_when=asyncio.FIRST_COMPLETED)
        for event in events:
            if event.done():
                return event.result()
        raise ProcessEndedError(next(child.epitaph() for child in self._children if child.ended.done()))

    async def _ready(self) -> None:
        """Returns when the router serves. Says now and then what it is waiting for."""
        start = time.monotonic()
        report = start + REPORT_SECONDS
        waiting = dict(zip((shard.name for shard in self._shards), self._sockets, strict=True))
        while waiting or not await is_healthy(*self._address):
            await asyncio.sleep(POLL_SECONDS)
            waiting = {name: socket for name, socket in waiting.items() if not is_listening(socket)}
            if time.monotonic() > report:
                names = ", ".join(waiting) or self._router.name
                logger.info("waiting for %s (%d s)", names, time.monotonic() - start)
                report += REPORT_SECONDS
        logger.info("ready on http://%s after %.1f s", authority(*self._address), time.monotonic() - start)

    async def _until_stopped(self) -> None:
        await self._stopping.wait()

    async def _stop(self, grace: float) -> None:
        shards = self._children[: len(self._shards)]
        for router in self._children[len(self._shards) :]:
            await router.stop(grace)
        await asyncio.gather(*(shard.stop(min(grace, SHARD_SECONDS)) for shard in shards))
