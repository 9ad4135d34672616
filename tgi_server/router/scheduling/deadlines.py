"""The deadlines of requests: an alarm at the next one."""

import asyncio
from collections.abc import Callable, Iterable
from math import inf


class DeadlineAlarm:
    """Calls `expire` when the next deadline comes, also while the shards compute one long step.

    A request that has ended may still cause a call.
    """

    def __init__(self, expire: Callable[[], None], clock: Callable[[], float]) -> None:
        """clock: in seconds; deadlines are times of this clock."""
        self._expire = expire
        self._clock = clock
        self._next = inf  # no deadline is earlier
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Sets timers from now on."""
        self._loop = loop
        self._set()

    def stop(self) -> None:
        """Sets no more timers."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()

    def add(self, deadline: float) -> None:
        """Notes the deadline of one more request."""
        if deadline < self._next:
            self._next = deadline
            self._set()

    def is_due(self, now: float) -> bool:
        """Returns True if a deadline may have passed."""
        return now >= self._next

    def reset(self, deadlines: Iterable[float]) -> None:
        """Notes the deadlines of all requests that are left."""
        self._next = min(deadlines, default=inf)
        self._set()

    def _set(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._loop is not None and self._next < inf:
            self._timer = self._loop.call_at(self._loop.time() + self._next - self._clock(), self._ring)

    def _ring(self) -> None:
        self._expire()
        self._set()
