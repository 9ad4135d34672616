"""A router that says for how long its event loop stood still: `text-generation-router`, with a socket for the question.

    python -m tests.fakes.watched_router /tmp/watch --tokenizer-name=FOLDER ...

Whoever connects to the socket is sent one line, the longest time in seconds since the last connection.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tgi_server.router import cli, startup
from tgi_server.router.settings import RouterSettings

_TICK_SECONDS = 0.002


class LoopWatch:
    """Measures each turn of the running loop, in seconds.

    On a busy machine a turn takes longer than its work, since the loop's thread waits for a processor. The kernel
    counts that time, and it is left out. What the turn took from others is at least the CPU time of that thread; if
    another thread held the interpreter's lock, it is in the CPU time of the process.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._schedule = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._last = self._now()
        self._longest = 0.0
        self._tick()

    def longest(self) -> float:
        """Returns the longest turn since the last call."""
        self._measure()
        longest, self._longest = self._longest, 0.0
        return longest

    def _now(self) -> tuple[float, float, float, float]:
        queued = int(self._schedule.read_text().split()[1]) / 1e9  # seconds in which it waited for a processor
        return time.monotonic(), queued, time.process_time(), time.thread_time()

    def _measure(self) -> None:
        now = self._now()
        wall, queued, process, thread = (after - before for after, before in zip(now, self._last, strict=True))
        self._longest = max(self._longest, thread, min(wall - queued, process))
        self._last = now

    def _tick(self) -> None:
        self._measure()
        self._loop.call_later(_TICK_SECONDS, self._tick)


def main() -> None:
    path = sys.argv.pop(1)
    serve = startup.run

    async def run(settings: RouterSettings, open_front: Callable[..., Any]) -> None:
        watch = LoopWatch()

        async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(f"{watch.longest():.6f}\n".encode())
            writer.close()

        async with await asyncio.start_unix_server(tell, path):
            await serve(settings, open_front)

    startup.run = run  # where the program looks for it
    cli.main()


if __name__ == "__main__":
    main()
