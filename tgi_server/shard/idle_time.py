"""What is done while no call comes."""

import asyncio
from collections.abc import Callable

_IDLE_SECONDS = 0.02
_AT_ONCE_SECONDS = 0.001


class IdleTime:
    """Spends idle time on work that can be done a little at a time. What comes meanwhile waits for a little of it."""

    def __init__(self, work: Callable[[float], bool]) -> None:
        """work: works for so many seconds, and says whether there is more to do."""
        self._work = work
        self._next: asyncio.Handle | None = None

    def begins(self) -> None:
        """Nothing is to be done, unless a call comes soon. To be called after every call, on the event loop."""
        if self._next is not None:
            self._next.cancel()
        self._next = asyncio.get_running_loop().call_later(_IDLE_SECONDS, self._go_on)

    def _go_on(self) -> None:
        more = self._work(_AT_ONCE_SECONDS)
        self._next = asyncio.get_running_loop().call_soon(self._go_on) if more else None
