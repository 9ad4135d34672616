"""SIGTERM and SIGINT, which ask a program to stop."""

import asyncio
import signal
from collections.abc import Callable

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def on_stop_signal(act: Callable[[], object]) -> None:
    """Makes the running event loop call `act` at each of the signals, and nothing that it called before.

    The loop's own signal handlers are not used, because a signal that comes while one is replaced kills the process.
    """
    loop = asyncio.get_running_loop()

    def tell(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(act)

    for number in _STOP_SIGNALS:
        signal.signal(number, tell)


def ignore_stop_signals() -> None:
    """Ignores the signals from now on. A program that has stopped calls this, so that it exits with its own status."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
