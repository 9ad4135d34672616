"""SIGTERM and SIGINT: what asks a program to stop."""

import asyncio
import signal
from collections.abc import Callable

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def on_stop_signal(act: Callable[[], object]) -> None:
    """Has the running event loop call `act` at each of the signals, instead of what it called before.

    Without the loop's own handlers: to take one of these away is to be killed by a signal that comes right then.
    """
    loop = asyncio.get_running_loop()

    def tell(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(act)

    for number in _STOP_SIGNALS:
        signal.signal(number, tell)


def ignore_stop_signals() -> None:
    """For a program that has stopped: whoever asks again would only turn its good end into a bad one."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
