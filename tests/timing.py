"""Waiting for what happens beside a test, on machines that have other things to do."""

import asyncio
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import grpc

ATTEMPTS = 10
# Long enough for a machine that stands still now and then: only a test that fails takes it.
SECONDS = 30.0

P = ParamSpec("P")


def until(condition: Callable[[], bool], seconds: float = SECONDS) -> float:
    """Waits for the condition. Returns the seconds that it took; fails after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not come true in time"
        time.sleep(0.005)
    return time.monotonic() - started


async def eventually(condition: Callable[[], bool]) -> None:
    """Lets the event loop go on until the condition is true."""
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.01)


def on_a_busy_machine(test: Callable[P, None]) -> Callable[P, None]:
    """Repeats a test of short times: other programs may make an attempt late, but a slow service is late each time."""

    @wraps(test)
    def repeated(*arguments: P.args, **named: P.kwargs) -> None:
        for _ in range(ATTEMPTS - 1):
            try:
                return test(*arguments, **named)
            except (AssertionError, grpc.RpcError):
                time.sleep(0.5)
        return test(*arguments, **named)

    return repeated
