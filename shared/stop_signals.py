"""SIGTERM and SIGINT, which ask a program to stop."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_READ_BYTES = 4096
# The event loop that signals wake up, and the two ends of the socket pair that does it.
_woken: tuple[asyncio.AbstractEventLoop, socket.socket, socket.socket] | None = None
# The event loop that has had such a signal.
_stopped: asyncio.AbstractEventLoop | None = None


def on_stop_signal(act: Callable[[], object]) -> None:
    """Makes the running event loop call `act` at each of the signals, and nothing that it called before.

    A signal that has come already counts, too: it may have come after the program last looked at what the earlier
    function did. The loop's own signal handlers are not used, because a signal that comes while one is replaced kills
    the process.
    """
    loop = asyncio.get_running_loop()

    def tell(*_: object) -> None:
        global _stopped
        if not loop.is_closed():
            _stopped = loop
            loop.call_soon_threadsafe(act)

    _wake_up(loop)
    for number in _STOP_SIGNALS:
        signal.signal(number, tell)
    if _stopped is loop:
        loop.call_soon(act)


def ignore_stop_signals() -> None:
    """Ignores the signals from now on. A program that has stopped calls this, so that it exits with its own status."""
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _wake_up(loop: asyncio.AbstractEventLoop) -> None:
    """Makes each signal write a byte that wakes up the event loop; uvloop does so by itself.

    The interpreter runs `tell` between two of its instructions. A signal that comes after the last of them and before
    the system call in which the loop waits would else be noticed when something else happens, which may be never.
    """
    global _woken  # the interpreter has one such descriptor, too
    if not isinstance(loop, asyncio.SelectorEventLoop) or (_woken is not None and _woken[0] is loop):
        return
    receiving, sending = socket.socketpair()
    for each in (receiving, sending):
        each.setblocking(False)

    def drain() -> None:
        with contextlib.suppress(BlockingIOError):
            receiving.recv(_READ_BYTES)

    loop.add_reader(receiving, drain)
    signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
    _woken = loop, receiving, sending
