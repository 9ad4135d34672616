"""Groups of shards beside one router: a group that ends harms no other, and the router has them started again."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.fakes import processes
from tests.timing import SECONDS
from tgi_server.launcher.errors import ProcessEndedError
from tgi_server.launcher.processes.groups import GroupSupervisor, ModelShards
from tgi_server.launcher.processes.sockets import is_listening


class Server:
    """Two groups of a shard each, and a router whose end of the control socket the test has."""

    def __init__(self, folder: Path, port: int) -> None:
        self.marker = folder / "marker"
        self.sockets = [folder / f"shard-{rank}" for rank in range(2)]
        self.groups = [
            ModelShards(name, [processes.shard(rank, self.sockets[rank], self.marker)], [self.sockets[rank]])
            for rank, name in enumerate(("large", "small"))
        ]
        self.control = folder / "control"
        self.ready = 0
        router = processes.router(port, self.marker)
        self.supervisor = GroupSupervisor(self.groups, router, self.control, ("127.0.0.1", port), 5, self._on_ready)
        self.reports: list[tuple[int, str]] = []
        self.reasons: list[str] = []

        self.others = psutil.Process().children()  # of other tests

    def children(self) -> list[psutil.Process]:
        """Returns the processes that this server has started."""
        return [each for each in psutil.Process().children() if each not in self.others]

    def _on_ready(self) -> None:
        self.ready += 1

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(self.control)
        self.listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        while line := await self.reader.readline():
            report = json.loads(line)
            self.reports.append((report["model"], report["state"]))
            self.reasons.append(report["reason"])

    def load(self, index: int) -> None:
        self.writer.write(json.dumps({"load": index}).encode() + b"\n")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.02)

    def process(self, name: str) -> psutil.Process:
        (found,) = (each for each in self.children() if any(part.endswith(name) for part in each.cmdline()))
        return found


async def test_the_life_of_two_groups(
    tmp_path: Path, free_port: Callable[[], int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    server = Server(tmp_path, free_port())
    running = asyncio.create_task(server.supervisor.run())
    await server.until(server.control.exists)
    await server.connect()
    await server.until(lambda: (0, "loaded") in server.reports and server.ready == 1)
    assert (1, "stopped") in server.reports  # it starts when the router wants it
    server.load(1)
    await server.until(lambda: (1, "loaded") in server.reports)

    os.kill(server.process("shard-1").pid, signal.SIGKILL)
    await server.until(lambda: (1, "failed") in server.reports)
    assert server.reasons[-1].startswith("shard-1 was killed by SIGKILL")
    assert is_listening(server.sockets[0])
    server.reports.clear()
    server.load(1)
    await server.until(lambda: (1, "loaded") in server.reports)
    server.reports.clear()
    server.load(1)  # says again that it is there
    await server.until(lambda: server.reports == [(1, "loaded")])

    server.supervisor.stop()
    await running
    lines = server.marker.read_text().splitlines()
    assert lines[0] == "router stopped"
    assert sorted(lines[1:]) == ["shard-0 stopped", "shard-1 stopped"]
    assert not server.children()
    server.listening.cancel()
    server.writer.close()


async def test_a_router_that_ends_ends_all(tmp_path: Path, free_port: Callable[[], int]) -> None:
    server = Server(tmp_path, port := free_port())
    running = asyncio.create_task(server.supervisor.run())
    await server.until(lambda: server.ready == 1 and is_listening(server.sockets[0]))  # it heeds SIGTERM from then on
    router = next(each for each in server.children() if str(port) in each.cmdline())
    os.kill(router.pid, signal.SIGKILL)
    with pytest.raises(ProcessEndedError, match="router was killed by SIGKILL"):
        await running
    assert server.marker.read_text().splitlines() == ["shard-0 stopped"]
    assert not server.children()
