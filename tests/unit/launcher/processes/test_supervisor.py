import asyncio
import contextlib
import http.server
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.fakes import processes
from tgi_server.launcher.errors import ProcessEndedError
from tgi_server.launcher.processes.sockets import is_listening, router_socket
from tgi_server.launcher.processes.supervisor import LoadingBar, Supervisor

BROKEN = "print('loading'); raise SystemExit('shard-1: no memory left')"


class Server:
    """Three shards and a router, supervised."""

    def __init__(self, folder: Path, port: int) -> None:
        self.port = port
        self.marker = folder / "marker"
        self.sockets = [folder / f"shard-{rank}" for rank in range(3)]
        self.shards = [processes.shard(rank, socket, self.marker) for rank, socket in enumerate(self.sockets)]
        self.router = processes.router(port, self.marker)
        self.grace = 5.0

    async def run(self, *events: Callable[[Supervisor], None]) -> float:
        """Once the server is ready, `events` happen, a moment apart. Returns how long it then took to end (seconds)."""
        supervisor = Supervisor(self.shards, self.sockets, self.router, ("127.0.0.1", self.port), self.grace)
        running = asyncio.create_task(supervisor.run())
        while not all(map(is_listening, (*self.sockets, router_socket(self.sockets[0])))):
            assert not running.done(), "ended before it was ready"
            await asyncio.sleep(0.02)
        start = time.monotonic()
        for event in events:
            event(supervisor)
            await asyncio.sleep(0.1)
        try:
            await running
        finally:
            self.seconds = time.monotonic() - start
        return self.seconds


@pytest.fixture
def server(tmp_path: Path, free_port: Callable[[], int]) -> Server:
    return Server(tmp_path, free_port())


@pytest.fixture(autouse=True)
def nothing_is_left() -> object:
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert not left


def kill(name: str) -> Callable[[Supervisor], None]:
    def event(_: Supervisor) -> None:
        child = next(
            process for process in psutil.Process().children() if any(part.endswith(name) for part in process.cmdline())
        )
        os.kill(child.pid, signal.SIGKILL)

    return event


async def test_the_router_stops_before_the_shards(server: Server) -> None:
    server.router = processes.router(server.port, server.marker, drain=0.5)
    await server.run(Supervisor.stop)
    assert server.marker.read_text().splitlines()[0] == "router stopped"
    assert sorted(server.marker.read_text().splitlines()[1:]) == [f"shard-{rank} stopped" for rank in range(3)]


async def test_a_killed_shard_ends_all_and_is_named(server: Server) -> None:
    with pytest.raises(ProcessEndedError, match="shard-1 was killed by SIGKILL"):
        await server.run(kill("shard-1"))
    assert server.seconds < 10
    assert sorted(server.marker.read_text().splitlines()) == ["router stopped", "shard-0 stopped", "shard-2 stopped"]


async def test_a_killed_router_ends_all(server: Server) -> None:
    with pytest.raises(ProcessEndedError, match="router was killed by SIGKILL"):
        await server.run(kill(str(server.port)))


async def test_a_shard_that_dies_while_others_load_is_named_with_its_last_words(server: Server) -> None:
    server.shards = [
        processes.shard(0, server.sockets[0], server.marker, seconds=60),
        processes.program("shard-1", BROKEN),
        processes.shard(2, server.sockets[2], server.marker, seconds=60),
    ]
    start = time.monotonic()
    with pytest.raises(ProcessEndedError, match=r"shard-1 ended with exit code 1: no memory left$"):
        await Supervisor(server.shards, server.sockets, server.router, ("127.0.0.1", server.port), 5).run()
    assert time.monotonic() - start < 10


async def test_a_server_that_had_the_port_first_is_not_taken_for_the_router(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    wait = f"import os, time\nwhile not os.path.exists({str(server.sockets[0])!r}): time.sleep(0.01)\n"
    server.shards, server.sockets = server.shards[:1], server.sockets[:1]
    server.router = processes.program("router", f"{wait}time.sleep(0.5); raise SystemExit('the port is in use')")
    caplog.set_level("INFO")

    class Healthy(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", server.port), Healthy) as other:
        threading.Thread(target=other.serve_forever).start()
        try:
            with pytest.raises(ProcessEndedError, match="router ended with exit code 1: the port is in use"):
                await Supervisor(server.shards, server.sockets, server.router, other.server_address, 5).run()
        finally:
            other.shutdown()
    assert not [line for line in caplog.messages if "ready" in line]


async def test_a_shard_that_only_missed_another_one_is_not_the_one_that_is_named(server: Server) -> None:
    server.shards[0] = processes.program("shard-0", "raise SystemExit(70)")
    server.shards[1] = processes.program("shard-1", "import time; time.sleep(0.6); raise SystemExit('no memory left')")
    with pytest.raises(ProcessEndedError, match=r"shard-1 ended with exit code 1: no memory left$"):
        await Supervisor(server.shards, server.sockets, server.router, ("127.0.0.1", server.port), 5).run()


@pytest.mark.slow
async def test_a_process_that_ignores_the_request_to_stop_is_killed(server: Server) -> None:
    server.router = processes.router(server.port, server.marker, drain=60)
    server.grace = 0.5
    assert 3 < await server.run(Supervisor.stop) < 10


async def test_a_second_request_to_stop_does_not_wait(server: Server) -> None:
    server.router = processes.router(server.port, server.marker, drain=60)
    server.grace = 60
    assert await server.run(Supervisor.stop, Supervisor.stop) < 5


async def test_grandchildren_end_too(server: Server, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    fork = f"import subprocess; open({str(pid)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid))\n"
    server.router = processes.program("router", fork + processes.ROUTER, server.port, 0, server.marker)
    await server.run(Supervisor.stop)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(pid.read_text())).status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
async def test_waiting_is_reported(server: Server, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    monkeypatch.setattr("tgi_server.launcher.processes.supervisor.REPORT_SECONDS", 0.3)
    server.shards[2] = processes.shard(2, server.sockets[2], server.marker, seconds=1.5)
    caplog.set_level("INFO")
    await server.run(lambda _: None, Supervisor.stop)
    assert any(line.startswith("loading: ") and line.endswith("; waiting for shard-2") for line in caplog.messages)
    assert any(line.startswith(f"ready on http://127.0.0.1:{server.port}") for line in caplog.messages)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_that_the_next_line_of_the_log_takes_the_place_of() -> None:
    terminal, file = Terminal(), io.StringIO()
    for output in (terminal, file):
        bar = LoadingBar(output)
        bar.show(40, "reading weights")
        bar.clear()
    shown, cleared, rest = terminal.getvalue().split("\r")
    assert shown == "[########............]  40 % reading weights "
    assert (cleared, rest) == (" " * len(shown), "")
    assert not file.getvalue()
