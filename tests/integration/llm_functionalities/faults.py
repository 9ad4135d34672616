"""Measures what callers see while a model server or the way to it fails, and how soon they have answers again.

    python -m tests.integration.llm_functionalities.faults

runs every fault under 64 callers and prints the table of docs/faults.md.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import grpc

from shared.stubs import llm_pb2, llm_pb2_grpc
from tests.fakes.model_server import ModelServer
from tests.fakes.name_server import NameServer
from tests.integration.llm_functionalities.service import Service, running_service

CALLERS = 64
TIMEOUT_SECONDS = 1.0
PAUSE_SECONDS = 0.2
HEALTHY_SECONDS = 1.0
FAULTY_SECONDS = 4.5
RECOVERY_SECONDS = 5.0
# Longer than the service keeps idle connections.
IDLE_SECONDS = 4.0

SLOW = "slow"
SLOW_SECONDS = 2.0
FLAGS = ("--threads", str(CALLERS), "--batch-threads", "32")


@dataclass(frozen=True)
class Fault:
    """`flags` start a service whose endpoint is well; `inflict` and `heal` do what the name says."""

    flags: tuple[str, ...]
    inflict: Callable[[], None]
    heal: Callable[[], None]


def _model_server(port: int = 0) -> ModelServer:
    """Well, and slow when asked to be."""
    server = ModelServer(port)
    server.answer = _answer
    return server


def _answer(prompt: str) -> str:
    time.sleep(SLOW_SECONDS if prompt == SLOW else 0)
    return "a fine answer"


def _server_fault(fault: str | int, sick: bool) -> "Iterator[Fault]":
    with _model_server() as server:
        server.sick = sick
        yield Fault(
            ("--endpoint", server.url),
            lambda: setattr(server, "fault", fault),
            lambda: setattr(server, "fault", None),
        )


def _name_fault(mode: str) -> Iterator[Fault]:
    """Connections last, and the name is needed again only for new ones: the server dies with its name."""
    with _model_server() as server, NameServer({"tgi.": [("A", "127.0.0.1")]}) as names:

        def inflict() -> None:
            if mode == "absent":
                names.records.clear()
            else:
                names.mode = mode
            server.kill()

        def heal() -> None:
            server.start()
            names.records["tgi."] = [("A", "127.0.0.1")]
            names.mode = "answer"

        yield Fault(("--endpoint", f"tgi:{server.port}", "--name-servers", f"127.0.0.1:{names.port}"), inflict, heal)


def _refused() -> Iterator[Fault]:
    with _model_server() as server:
        yield Fault(("--endpoint", server.url), server.kill, server.start)


def _silent_host() -> Iterator[Fault]:
    """Gives the address of a host that answers no SYN: a listener whose backlog is full stands for it."""
    with _model_server() as server, ExitStack() as blocked:

        def inflict() -> None:
            server.kill()
            listener = blocked.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", server.port))
            listener.listen(0)
            for _ in range(3):
                filler = blocked.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", server.port))

        def heal() -> None:
            blocked.close()
            server.start()

        yield Fault(("--endpoint", server.url), inflict, heal)


def _killed_process() -> Iterator[Fault]:
    """A process of its own, killed with SIGKILL under load, and started again a second later."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        running.append(subprocess.Popen([sys.executable, "-m", __spec__.name, str(port)]))
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                return
            time.sleep(0.01)

    def kill() -> None:
        process = running.pop()
        process.send_signal(signal.SIGKILL)
        process.wait()

    start()
    try:
        yield Fault(("--endpoint", f"127.0.0.1:{port}"), kill, start)
    finally:
        kill()


FAULTS: dict[str, Callable[[], Iterator[Fault]]] = {
    "endpoint absent: its host does not answer": _silent_host,
    "name does not exist (NXDOMAIN)": lambda: _name_fault("absent"),
    "name server answers SERVFAIL": lambda: _name_fault("servfail"),
    "name server never answers": lambda: _name_fault("silent"),
    "connection refused": _refused,
    "accepts and hangs": lambda: _server_fault("hang", sick=True),
    "accepts and hangs, though healthy": lambda: _server_fault("hang", sick=False),
    "trickles a byte every 50 ms": lambda: _server_fault("trickle", sick=False),
    "resets in the middle of its answer": lambda: _server_fault("reset", sick=True),
    "answers 429": lambda: _server_fault(429, sick=False),
    "answers 503": lambda: _server_fault(503, sick=True),
    "answers 500": lambda: _server_fault(500, sick=False),
    "answers with garbage JSON": lambda: _server_fault("garbage", sick=False),
    "killed and restarted under load": _killed_process,
}


@dataclass
class Measured:
    """Times in seconds."""

    # Calls made while the fault lasted.
    calls: int = 0
    # Of these, how many had a text (from before the fault took hold).
    answered: int = 0
    # Of these, how many ended with anything else than an answer.
    errors: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    median: float = 0.0
    longest: float = 0.0
    # Seconds from its deadline to the latest answer; negative when all came before.
    late: float = 0.0
    # Seconds by which the measuring process itself was late at times: no answer can be seen sooner.
    own_lag: float = 0.0
    # Seconds from the fault's end to the first text.
    recovery: float = float("inf")
    # Seconds from the fault's end until every caller had a text.
    all_recovered: float = float("inf")
    # Threads and sockets of the service, idle, before and after.
    threads: tuple[int, int] = (0, 0)
    sockets: tuple[int, int] = (0, 0)


@dataclass
class _Callers:
    """Many callers of one service, each with one call at a time."""

    stub: llm_pb2_grpc.LLMRunnerStub
    measured: Measured
    faulty: bool = False
    healed_at: float | None = None
    times: list[float] = field(default_factory=list)
    recovered: set[int] = field(default_factory=set)

    async def run(self, number: int) -> None:
        await asyncio.sleep(PAUSE_SECONDS * number / CALLERS)
        request = llm_pb2.ModelRequest(formatted_prompt=f"caller {number}", timeout=int(TIMEOUT_SECONDS * 1000))
        while True:
            faulty, begun = self.faulty, time.monotonic()
            call = self.stub.call_model(request)
            try:
                text = (await call).text
                reason = "" if text else dict(await call.trailing_metadata()).get("empty-reason", "")
            except grpc.aio.AioRpcError as error:
                text, reason = "", error.code().name
                self.measured.errors += 1
            self._note(number, faulty and self.faulty, begun, time.monotonic(), text, reason)
            await asyncio.sleep(PAUSE_SECONDS)

    def _note(self, number: int, faulty: bool, begun: float, ended: float, text: str, reason: str) -> None:
        if faulty:
            self.measured.calls += 1
            self.measured.answered += bool(text)
            self.measured.reasons[reason] += 1
            self.times.append(ended - begun)
        if text and self.healed_at is not None and begun > self.healed_at:
            self.recovered.add(number)
            self.measured.recovery = min(self.measured.recovery, ended - self.healed_at)
            if len(self.recovered) == CALLERS and self.measured.all_recovered == float("inf"):
                self.measured.all_recovered = ended - self.healed_at


async def _watch_own_lag(measured: Measured) -> None:
    while True:
        begun = time.monotonic()
        await asyncio.sleep(0.005)
        measured.own_lag = max(measured.own_lag, time.monotonic() - begun - 0.005)


@asynccontextmanager
async def _background(measured: Measured, callers: _Callers) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(callers.run(number)) for number in range(CALLERS)]
    tasks.append(asyncio.create_task(_watch_own_lag(measured)))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _settled(service: Service, stub: llm_pb2_grpc.LLMRunnerStub) -> tuple[int, int]:
    """Threads and sockets of the service once idle connections are gone; one call makes it drop them."""
    await asyncio.sleep(IDLE_SECONDS)
    await stub.call_model(llm_pb2.ModelRequest(formatted_prompt="settle"))
    await asyncio.sleep(0.2)
    return service.threads(), service.sockets()


async def _measure(service: Service, fault: Fault) -> Measured:
    measured = Measured()
    async with grpc.aio.insecure_channel(service.address) as channel:
        stub = llm_pb2_grpc.LLMRunnerStub(channel)
        # So that the service has started all the threads that it ever will.
        await asyncio.gather(*(stub.call_model(llm_pb2.ModelRequest(formatted_prompt=SLOW)) for _ in range(CALLERS)))
        before = await _settled(service, stub)
        callers = _Callers(stub, measured)
        async with _background(measured, callers):
            await asyncio.sleep(HEALTHY_SECONDS)
            measured.own_lag = 0.0
            await asyncio.to_thread(fault.inflict)
            callers.faulty = True
            await asyncio.sleep(FAULTY_SECONDS)
            callers.faulty = False
            await asyncio.to_thread(fault.heal)
            callers.healed_at = time.monotonic()
            await asyncio.sleep(RECOVERY_SECONDS)
        after = await _settled(service, stub)
    measured.median = sorted(callers.times)[len(callers.times) // 2]
    measured.longest = max(callers.times)
    measured.late = measured.longest - TIMEOUT_SECONDS
    measured.threads, measured.sockets = (before[0], after[0]), (before[1], after[1])
    return measured


def measure(name: str) -> Measured:
    """Runs the service, its callers, and one fault."""
    with (
        priority(),
        contextmanager(FAULTS[name])() as fault,
        running_service(*fault.flags, *FLAGS) as service,
    ):
        return asyncio.run(_measure(service, fault))


@contextmanager
def priority() -> Iterator[None]:
    """Runs before whatever else the machine has to do, where that is allowed: the times are to be the service's own."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def main() -> None:
    if len(sys.argv) > 1:
        with _model_server(int(sys.argv[1])):
            threading.Event().wait()
    print("| fault | calls | empty | errors | median | longest | past deadline | back after | all back | leaked |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name in FAULTS:
        it = measure(name)
        leaked = max(0, it.threads[1] - it.threads[0]) + max(0, it.sockets[1] - it.sockets[0])
        late = f"{it.late * 1000:.0f} ms" if it.late > 0 else "never"
        print(
            f"| {name} | {it.calls} | {it.calls - it.answered} | {it.errors} | {it.median * 1000:.1f} ms "
            f"| {it.longest * 1000:.0f} ms | {late} | {it.recovery:.2f} s | {it.all_recovered:.2f} s | {leaked} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
