"""Measures how late this process gets to act, which is no fault of the services that it measures."""

import asyncio
import contextlib
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import takewhile

PAUSE_SECONDS = 0.002
NOTED_SECONDS = 0.001


class Delays:
    """The delays of an idle thread, which the machine causes, and of the event loop, which its tasks cause, too."""

    def __init__(self) -> None:
        self._of_thread: list[tuple[float, float]] = []
        self._of_loop: list[tuple[float, float]] = []

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._watch_thread, args=(over,))
        thread.start()
        loop = asyncio.create_task(self._watch_loop())
        try:
            yield
        finally:
            over.set()
            thread.join()
            loop.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loop

    def _watch_thread(self, over: threading.Event) -> None:
        while not over.is_set():
            due = time.monotonic() + PAUSE_SECONDS
            time.sleep(PAUSE_SECONDS)
            _note(self._of_thread, due)

    async def _watch_loop(self) -> None:
        while True:
            due = time.monotonic() + PAUSE_SECONDS
            await asyncio.sleep(PAUSE_SECONDS)
            _note(self._of_loop, due)

    def between(self, begun: float, ended: float) -> float:
        """The most that an answer due at `begun` and seen at `ended` can have been delayed by others than its sender.

        Its sender may wait for the processor as long as the idle thread did at that time, and this process may take
        its answer as late as its event loop came to other things.
        """
        return _longest(self._of_thread, begun, ended) + _longest(self._of_loop, begun, ended)

    def worst(self) -> float:
        """The longest that the idle thread has waited, in seconds."""
        return max((until - due for due, until in self._of_thread), default=0.0)


def _note(delays: list[tuple[float, float]], due: float) -> None:
    now = time.monotonic()
    if now - due > NOTED_SECONDS:
        delays.append((due, now))


def _longest(delays: list[tuple[float, float]], begun: float, ended: float) -> float:
    """Returns the longest of the delays that overlap a time. They are in order, and none overlaps another."""
    first = bisect_right(delays, begun, key=lambda delay: delay[1])
    overlapping = takewhile(lambda delay: delay[0] < ended, (delays[place] for place in range(first, len(delays))))
    return max((until - due for due, until in overlapping), default=0.0)
