"""Two services in front of two servers that are stopped, replaced, killed, frozen, or refuse everything, under load.

What a server had not begun is answered by the other one: drains and refusals lose no call, and a kill loses only calls
that were under way.
"""

import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.conftest import FreePort
from tests.integration.llm_functionalities.service import running_service
from tests.integration.router.process import Process
from tests.timing import until
from tgi_server import demo_model

CALLERS = 16
TOKENS = 12
STEP_SECONDS = 0.001
TIMEOUT_MS = 10_000
FAULT_SECONDS = 1.0


class Replica:
    """A router in front of a shard that needs no model, on a port of its own."""

    def __init__(self, folder: Path, port: int, step_seconds: float = STEP_SECONDS) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._folder = folder
        self._socket = folder / "shard"
        command = [sys.executable, "-m", "tests.fakes.instant_shard", f"--uds-path={self._socket}"]
        self._shard = subprocess.Popen([*command, f"--step-seconds={step_seconds}"])
        self._port = port
        self._starts = itertools.count()
        self._router: Process | None = None

    @property
    def router(self) -> Process:
        assert self._router is not None
        return self._router

    def start(self, *flags: str) -> "Replica":
        until(self._socket.exists)
        self._router = Process(
            self._folder / f"router-{next(self._starts)}.log",
            *("--prometheus-port=0", "--hostname=127.0.0.1", f"--port={self._port}"),
            *(f"--tokenizer-name={demo_model.PATH}", f"--master-shard-uds-path={self._socket}", *flags),
        )
        return self

    def until_ready(self) -> "Replica":
        self.router.until_ready(self.url)
        return self

    def signal(self, number: int) -> None:
        self.router.popen.send_signal(number)

    def drain(self) -> None:
        """Stops the router as its users do. Returns once it has ended."""
        self.signal(signal.SIGTERM)
        assert self.router.wait() == 0, self.router.log.read_text()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.router.wait()

    def end(self) -> None:
        for process in (self._router.popen if self._router else None, self._shard):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


@dataclass
class Calls:
    """Calls of several callers, who take the services in turn and have one call each under way.

    lost: the time when each call began that has no answer, and why.
    """

    addresses: list[str]
    answered: int = 0
    lost: list[tuple[float, str]] = field(default_factory=list)
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def going_on(self) -> Iterator["Calls"]:
        """Makes calls until the context ends, which waits for the last of them."""
        ending = threading.Event()
        callers = [threading.Thread(target=self._call, args=(ending,)) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        try:
            yield self
        finally:
            ending.set()
            for caller in callers:
                caller.join()

    def until_more(self, count: int) -> None:
        """Waits until so many more calls have been answered."""
        enough = self.answered + count
        until(lambda: self.answered >= enough, 60)

    def reasons(self) -> set[str]:
        return {reason for _, reason in self.lost}

    def _call(self, ending: threading.Event) -> None:
        channels = [grpc.insecure_channel(each) for each in self.addresses]
        stubs = itertools.cycle([llm_pb2_grpc.LLMRunnerStub(channel) for channel in channels])
        while not ending.is_set():
            number = next(self._numbers)
            request = llm_pb2.ModelRequest(
                formatted_prompt=f"Call {number}", max_tokens=TOKENS if number % 4 else 10 * TOKENS, timeout=TIMEOUT_MS
            )
            begun = time.monotonic()
            try:
                response, call = next(stubs).call_model.with_call(request)
                reason = "" if response.text else dict(call.trailing_metadata() or ()).get("empty-reason", "no reason")
            except grpc.RpcError as error:
                reason = error.code().name
            with self._lock:
                if reason:
                    self.lost.append((begun, reason))
                else:
                    self.answered += 1
        for channel in channels:
            channel.close()


@dataclass
class Stack:
    replicas: list[Replica]
    calls: Calls


@contextmanager
def running_stack(folder: Path, free_port: FreePort) -> Iterator[Stack]:
    """Two servers, which have not been started, and two services that know both."""
    replicas = []
    try:
        for name in ("a", "b"):
            (folder / name).mkdir()
            replicas.append(Replica(folder / name, free_port()))
        endpoints = ",".join(replica.url for replica in replicas)
        with running_service("--endpoint", endpoints) as one, running_service("--endpoint", endpoints) as other:
            yield Stack(replicas, Calls([one.address, other.address]))
    finally:
        for replica in replicas:
            replica.end()


@pytest.fixture
def stack(tmp_path: Path, free_port: FreePort) -> Iterator[Stack]:
    with running_stack(tmp_path, free_port) as stack:
        yield stack


@pytest.mark.slow
def test_neither_a_server_that_is_not_there_nor_one_that_stops_loses_a_call(stack: Stack) -> None:
    first, second = stack.replicas
    second.start().until_ready()
    with stack.calls.going_on() as calls:
        calls.until_more(40)
        first.start().until_ready()
        calls.until_more(100)
        second.drain()
        calls.until_more(40)
    assert calls.lost == []


def roll(stack: Stack) -> None:
    for replica in stack.replicas:
        replica.drain()
        stack.calls.until_more(60)
        replica.start().until_ready()
        stack.calls.until_more(60)


def refuse(stack: Stack) -> None:
    """Replaces the first server by one that refuses all callers, and then by one that is always full."""
    first = stack.replicas[0]
    for flags in (("--api-key=another",), ("--max-concurrent-requests=1",)):
        first.drain()
        first.start(*flags).until_ready()
        stack.calls.until_more(150)
    first.drain()
    first.start().until_ready()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("disturb", [roll, refuse])
def test_drains_and_refusals_lose_no_call(disturb: Callable[[Stack], None], stack: Stack) -> None:
    for replica in stack.replicas:
        replica.start()
    for replica in stack.replicas:
        replica.until_ready()
    with stack.calls.going_on() as calls:
        calls.until_more(100)
        while calls.answered < 2000:
            disturb(stack)
        calls.until_more(100)
    assert calls.lost == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_lose_only_what_had_begun(stack: Stack) -> None:
    for replica in stack.replicas:
        replica.start()
    for replica in stack.replicas:
        replica.until_ready()
    killed = 0
    with stack.calls.going_on() as calls:
        calls.until_more(100)
        while calls.answered < 2000:
            for replica in stack.replicas:
                before = len(calls.lost)
                replica.kill()
                killed_at = time.monotonic()
                killed += 1
                calls.until_more(60)
                replica.start().until_ready()
                calls.until_more(60)
                assert all(begun < killed_at for begun, _ in calls.lost[before:])
    assert calls.reasons() <= {"connection_lost"}
    assert len(calls.lost) <= killed * CALLERS


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_frozen_server_loses_only_what_it_was_sent_before_that_was_known(stack: Stack) -> None:
    for replica in stack.replicas:
        replica.start()
    for replica in stack.replicas:
        replica.until_ready()
    frozen = 0
    with stack.calls.going_on() as calls:
        calls.until_more(100)
        while calls.answered < 2000:
            for replica in stack.replicas:
                replica.signal(signal.SIGSTOP)
                frozen += 1
                calls.until_more(60)
                time.sleep(FAULT_SECONDS)
                replica.signal(signal.SIGCONT)
                calls.until_more(300)
    assert calls.reasons() <= {"deadline"}
    assert len(calls.lost) <= frozen * CALLERS
