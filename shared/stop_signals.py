"""SIGTERM and SIGINT: what asks a program to stop."""

import asyncio
import signal
from collections.abc import Callable

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def on_stop_signal(act: Callable[[], object]) -> None:
    """Has the running event loop call `act` at each of the signals, instead of what it called before."""
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, act)


def ignore_stop_signals() -> None:
    """For a program that has stopped: whoever asks again would only turn its good end into a bad one."""
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
