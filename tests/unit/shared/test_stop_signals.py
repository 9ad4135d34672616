"""A signal to stop calls what was registered last, and nothing once a program has stopped."""

import asyncio
import ctypes
import operator
import os
import random
import select
import selectors
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import uvloop

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


async def test_a_signal_that_came_before_calls_what_is_registered_then() -> None:
    asked = asyncio.Event()
    on_stop_signal(lambda: None)
    os.kill(os.getpid(), signal.SIGTERM)
    on_stop_signal(asked.set)
    await asyncio.wait_for(asked.wait(), 5)


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


class LateSignals:
    """An epoll whose next wait, once it is `armed`, begins with a SIGTERM that no Python code can handle."""

    def __init__(self, epoll: select.epoll) -> None:
        self.armed = False
        self._epoll = epoll
        self._raise = partial(ctypes.CDLL(None).kill, os.getpid(), signal.SIGTERM)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._epoll, name)

    def poll(self, *arguments: Any) -> Any:
        wait = partial(self._epoll.poll, *arguments)
        if not self.armed:
            return wait()
        self.armed = False
        return list(map(operator.call, (self._raise, wait)))[-1]  # in C: between the two no handler is run


@pytest.mark.parametrize("rounds", [10, pytest.param(1000, marks=pytest.mark.slow)])
def test_no_signal_is_lost_that_comes_just_before_the_loop_waits(rounds: int) -> None:
    selector = selectors.EpollSelector()
    late = LateSignals(selector._selector)  # type: ignore[attr-defined]
    selector._selector = late  # type: ignore[attr-defined]

    async def stress() -> None:
        acted, lost = asyncio.Event(), list[int]()
        on_stop_signal(acted.set)
        for number in range(rounds):
            late.armed = True
            something_else = asyncio.get_running_loop().call_later(0.5, lost.append, number)
            await acted.wait()
            acted.clear()
            something_else.cancel()
        assert not lost

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(stress())


@pytest.mark.parametrize("make_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_a_signal_that_the_system_gives_to_another_thread_is_noticed(make_loop: Callable[[], Any]) -> None:
    async def wait() -> None:
        acted, over = asyncio.Event(), threading.Event()
        on_stop_signal(acted.set)
        thread = threading.Thread(target=over.wait)
        thread.start()
        await asyncio.sleep(0.01)
        threading.Timer(0.01, signal.pthread_kill, (thread.ident, signal.SIGTERM)).start()
        try:
            await acted.wait()  # without a timer, which would wake the loop up
        finally:
            over.set()

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(wait())


@pytest.mark.slow
@pytest.mark.parametrize("make_loop", [asyncio.SelectorEventLoop, uvloop.new_event_loop])
def test_no_signal_is_lost_whenever_it_comes(make_loop: Callable[[], Any]) -> None:
    """As in a launcher with children: a line of the log wakes the loop, and a signal comes before it sleeps again."""
    lines, line = os.pipe()
    acts, act = os.pipe()
    child = os.fork()
    if child == 0:
        with suppress(OSError):
            os.read(acts, 1)  # signals are handled from here on
            for _ in range(5000):
                os.write(line, b"a line")
                until = time.perf_counter() + random.random() * 0.0005
                while time.perf_counter() < until:
                    pass
                os.kill(os.getppid(), signal.SIGTERM)
                if not select.select([acts], [], [], 5)[0]:
                    os._exit(1)
                os.read(acts, 1)
        os._exit(0)

    async def follow() -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        on_stop_signal(lambda: os.write(act, b"x"))
        loop.add_reader(lines, os.read, lines, 4096)
        os.write(act, b"x")
        wait = asyncio.create_task(asyncio.to_thread(os.waitpid, child, 0))
        wait.add_done_callback(lambda _: ended.set())
        await ended.wait()
        loop.remove_reader(lines)
        return os.waitstatus_to_exitcode(wait.result()[1])

    with asyncio.Runner(loop_factory=make_loop) as runner:
        assert runner.run(follow()) == 0
    for each in (lines, line, acts, act):
        os.close(each)
