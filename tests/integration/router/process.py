"""A router in a process of its own."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

READY_SECONDS = 60.0
Start = Callable[..., "Process"]


class Process:
    """A router; its lines go to a file. open_files: how many it may have; None: as many as the tests.

    watch: a socket that says for how long its event loop stood still.
    """

    def __init__(self, log: Path, *flags: str, open_files: int | None = None, watch: Path | None = None) -> None:
        self.log = log
        program = ["tgi_server.router.cli"] if watch is None else ["tests.fakes.watched_router", str(watch)]
        command = [sys.executable, "-m", *program, *flags]
        if open_files is not None:
            command = ["prlimit", f"--nofile={open_files}:{open_files}", *command]
        with log.open("w") as output:
            self.popen = subprocess.Popen(command, stdout=output, stderr=output)

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait(self, seconds: float = 30.0) -> int:
        return self.popen.wait(seconds)

    def until_ready(self, url: str) -> "Process":
        deadline = time.monotonic() + READY_SECONDS
        while True:
            assert self.popen.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.05)


async def longest_turn(watch: Path) -> float:
    """Returns for how many seconds the loop of a watched router stood still since the last call, at the longest."""
    reader, writer = await asyncio.open_unix_connection(str(watch))
    line = await reader.readline()
    writer.close()
    return float(line)
