"""Processes that a program starts, and that must not outlive it."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

# See prctl(2).
_PR_SET_PDEATHSIG = 1


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> Callable[[], None] | None:
    """Returns a function for a new process to run first (`preexec_fn`): the kernel then sends it the signal `by` when
    the thread that started it ends, as it does when the whole process ends.

    Returns None on systems without prctl(2).
    """
    if sys.platform != "linux":
        return None
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, by)
        if os.getppid() != parent:
            os._exit(1)

    return bind


def port_name(host: str, port: int) -> str:
    """Returns the name of the abstract Unix socket that a server holds while it has a port and does not listen yet."""
    return f"\0text-generation-router {host} {port}"
