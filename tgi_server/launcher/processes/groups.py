"""Runs a server of several models: one group of shards per model, and one router. If a group ends, others go on."""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tgi_server.launcher.errors import ProcessEndedError
from tgi_server.launcher.machine import authority
from tgi_server.launcher.processes.child import Child, Command
from tgi_server.launcher.processes.sockets import is_listening, router_socket
from tgi_server.launcher.processes.supervisor import (
    ABORT_SECONDS,
    FAILURE_SECONDS,
    POLL_SECONDS,
    REPORT_SECONDS,
    SHARD_SECONDS,
    LoadingBar,
    first_dead,
)
from tgi_server.loading import read_progress, remove_progress

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ModelShards:
    """The shards of one model.

    label: the model's name. state: stopped, loading, loaded or failed, as reported to the router. reason: message of
    the failure. seconds: time that loading took.
    """

    label: str
    commands: Sequence[Command]
    sockets: Sequence[Path]
    state: str = "stopped"
    reason: str = ""
    seconds: float = 0.0
    children: list[Child] = field(default_factory=list)

    async def run(self, changed: Callable[["ModelShards"], None]) -> None:
        """Starts the shards. Returns when one of them has ended and the others have been stopped.

        changed: called after each change of `state`.
        """
        started = time.monotonic()
        try:
            for socket in self.sockets:  # of shards that have ended
                socket.unlink(missing_ok=True)
                remove_progress(socket)
            self._change("loading", changed)
            for command in self.commands:
                self.children.append(await Child.start(command))
            deaths = [child.ended for child in self.children]
            while not any(death.done() for death in deaths) and not all(map(is_listening, self.sockets)):
                await asyncio.wait(deaths, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if not any(death.done() for death in deaths):
                self.seconds = time.monotonic() - started
                logger.info("%s is loaded after %.1f s", self.label, self.seconds)
                self._change("loaded", changed)
                await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            dead = await first_dead(self.children)
            self.reason = "a shard ended" if dead is None else dead.exit_message()
            logger.error("%s: %s", self.label, self.reason)
        finally:
            await self.stop(SHARD_SECONDS)
        self._change("failed", changed)

    async def stop(self, grace: float) -> None:
        """Returns when the shards have ended. grace: seconds until they are killed."""
        await asyncio.gather(*(child.stop(grace) for child in self.children))
        self.children = []

    def _change(self, state: str, changed: Callable[["ModelShards"], None]) -> None:
        self.state = state
        changed(self)


class GroupSupervisor:
    """Runs the groups and the router. The router requests groups over the Unix socket `control`.

    Both ends send lines of JSON. The router sends `{"load": INDEX}`; the launcher sends `{"model": INDEX, "state":
    STATE, "reason": TEXT, "seconds": SECONDS}` after each change, and for all models when the router connects.
    """

    def __init__(
        self,
        groups: Sequence[ModelShards],
        router: Command,
        control: Path,
        address: tuple[str, int],
        graceful_termination_timeout: float,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """address: host and port that the router listens on. For the other parameters see `Supervisor`."""
        self._groups = groups
        self._router = router
        self._control = control
        self._address = address
        self._grace = graceful_termination_timeout
        self._on_ready = on_ready
        self._running: dict[int, asyncio.Task[None]] = {}
        self._peer: asyncio.StreamWriter | None = None
        self._stopping = asyncio.Event()
        self._children: list[Child] = []

    def stop(self) -> None:
        """Makes `run` stop all processes in order; a second call kills them."""
        if self._stopping.is_set():
            for child in (*self._children, *(each for group in self._groups for each in group.children)):
                child.kill()
            return
        logger.info("stopping; running requests have %d s to finish, a second signal ends them at once", self._grace)
        self._stopping.set()

    async def run(self) -> None:
        """Returns when all processes have ended after `stop`.

        Raises ProcessEndedError if the router ends by itself, after all groups have been stopped.
        """
        server = await asyncio.start_unix_server(self._talk, self._control)
        stopping = asyncio.create_task(self._stopping.wait())
        reporting = asyncio.create_task(self._report())
        grace = FAILURE_SECONDS
        try:
            self._load(0)
            router = await Child.start(self._router)
            self._children.append(router)
            await asyncio.wait((router.ended, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not stopping.done():
                raise ProcessEndedError(router.exit_message())
            grace = self._grace + ABORT_SECONDS
        finally:
            reporting.cancel()
            stopping.cancel()
            for child in self._children:
                await child.stop(grace)
            server.close()
            for task in self._running.values():
                task.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)
            await asyncio.gather(*(group.stop(min(grace, SHARD_SECONDS)) for group in self._groups))
            self._control.unlink(missing_ok=True)

    def _load(self, index: int) -> None:
        """Starts a group. If it already runs, its state is reported again."""
        if index in self._running and not self._running[index].done():
            self._tell(self._groups[index])
        elif not self._stopping.is_set():
            self._running[index] = asyncio.create_task(self._groups[index].run(self._tell))

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads the requests of the router from the socket."""
        self._peer = writer
        for group in self._groups:
            self._tell(group)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while line := await reader.readline():
                self._load(json.loads(line)["load"])
        writer.close()

    def _tell(self, group: ModelShards) -> None:
        if self._peer is not None and not self._peer.is_closing():
            told: dict[str, Any] = {"model": self._groups.index(group), "state": group.state}
            told |= {"reason": group.reason, "seconds": group.seconds}
            self._peer.write(json.dumps(told).encode() + b"\n")

    async def _report(self) -> None:
        """Logs the progress of loading at intervals, and when the router is ready."""
        start = time.monotonic()
        report = start + REPORT_SECONDS
        bar = LoadingBar(sys.stderr)
        ready = False
        while True:
            await asyncio.sleep(POLL_SECONDS)
            if not ready and is_listening(router_socket(self._groups[0].sockets[0])):
                ready = True
                bar.clear()
                logger.info("ready on http://%s after %.1f s", authority(*self._address), time.monotonic() - start)
                if self._on_ready is not None:
                    self._on_ready()
            for group in self._loading():
                percent, stage = read_progress(group.sockets[0])
                if not ready:
                    bar.show(percent, stage)
                if time.monotonic() > report:
                    logger.info("loading %s: %d %%, %s", group.label, percent, stage)
            if time.monotonic() > report:
                report = time.monotonic() + REPORT_SECONDS

    def _loading(self) -> Iterator[ModelShards]:
        return (group for group in self._groups if group.state == "loading")
