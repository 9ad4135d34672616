"""A signal to stop calls what was registered last, and nothing once a program has stopped."""

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from shared.stop_signals import ignore_stop_signals, on_stop_signal


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Puts this process's own handlers back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_calls_what_was_registered_last(number: signal.Signals) -> None:
    first, second = asyncio.Event(), asyncio.Event()
    on_stop_signal(first.set)
    on_stop_signal(second.set)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(second.wait(), 5)
    assert not first.is_set()


async def test_a_program_that_has_stopped_ignores_signals() -> None:
    asked = asyncio.Event()
    on_stop_signal(asked.set)
    ignore_stop_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.01)
    assert not asked.is_set()


def test_a_signal_after_the_loop_has_ended_does_no_harm() -> None:
    async def register() -> None:
        on_stop_signal(pytest.fail)

    asyncio.run(register())
    os.kill(os.getpid(), signal.SIGTERM)
