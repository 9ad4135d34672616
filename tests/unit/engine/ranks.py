"""Processes that serve as the shards of one group after another, because importing torch in new ones takes seconds.

with Ranks(2) as ranks:
    first, second = ranks.run(function, argument)  # function(group, argument) in both

After a call that fails the processes have ended: the shards may be out of step. If one has not answered in time, the
error says where the threads of all of them were.
"""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch

from shared.addresses import free_port
from tgi_server.engine.parallel import ShardGroup, connect

START_SECONDS = 300
ANSWER_SECONDS = 90
# Seconds that the others have for their answers once a rank has failed: they may wait for it in a collective.
FAULT_SECONDS = 30
END_SECONDS = 5


class Ranks:
    """Every call runs in all processes at once."""

    def __init__(self, count: int, *, answer_seconds: float = ANSWER_SECONDS, shared_memory: bool = True) -> None:
        """answer_seconds: that a call may take. shared_memory: False: the ranks have gloo alone."""
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.ended = False
        self._answer_seconds = answer_seconds
        self._folder = tempfile.TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = rank, count, port, there, self._stacks_of(rank), shared_memory
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers(START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self.ended = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(END_SECONDS)
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns the results of `function(group, *arguments)` in all processes, and raises what it raises there."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        try:
            return self._answers(self._answer_seconds)
        except BaseException:
            self.end()
            raise

    def run_alone(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function in one process only."""
        self._pipes[rank].send((function, arguments))
        (answer,) = self._answers(self._answer_seconds, [rank])
        return answer

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def _answers(self, seconds: float, ranks: Sequence[int] | None = None) -> list[Any]:
        asked = range(len(self._pipes)) if ranks is None else ranks
        waiting = {self._pipes[rank]: rank for rank in asked}
        answers: dict[int, Any] = {}
        fault: Exception | None = None
        deadline = time.monotonic() + seconds
        try:
            while waiting:
                ready = wait(list(waiting), max(deadline - time.monotonic(), 0))
                if not ready:
                    raise fault or TimeoutError(f"ranks {[*waiting.values()]} have not answered within {seconds} s")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    error, trace, answers[waiting.pop(pipe)] = pipe.recv()
                    if error is not None:
                        error.add_note(trace)
                        fault = fault or error
                        deadline = min(deadline, time.monotonic() + FAULT_SECONDS)
        except BaseException as error:  # pytest's own limit among them
            error.add_note(self._stacks())
            self.end()  # a late answer would be taken for that to the next call
            raise
        if fault is not None:
            raise fault
        return [answers[rank] for rank in asked]

    def _stacks_of(self, rank: int) -> str:
        return f"{self._folder.name}/{rank}"

    def _stacks(self) -> str:
        """Ends the processes. Returns how, and where their threads were."""
        found = []
        for process in self._processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGABRT)
        for rank, process in enumerate(self._processes):
            process.join(END_SECONDS)
            file = Path(self._stacks_of(rank))
            stacks, *_ = (file.read_text() if file.exists() else "").partition("\nExtension modules")
            found.append(f"rank {rank}, exit code {process.exitcode}:\n{stacks}")
        return "\n".join(found)


def _serve(rank: int, count: int, port: int, pipe: Connection, stacks: str, shared_memory: bool) -> None:
    with Path(stacks).open("w") as file:
        faulthandler.enable(file)  # writes where all threads are when a signal such as SIGABRT ends the process
        device = torch.device("cpu")
        group = connect(
            rank, count, "localhost", port, device=device, timeout=START_SECONDS, custom_kernels=shared_memory
        )
        torch.set_num_threads(1)
        importlib.import_module(
            "tests.unit.engine.requests"
        )  # the engine, for which a busy machine takes half a minute
        pipe.send((None, "", None))
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            pipe.send(_outcome(function, group, arguments))


def _outcome(function: Callable[..., Any], group: ShardGroup, arguments: tuple[Any, ...]) -> tuple[Any, str, Any]:
    try:
        return None, "", function(group, *arguments)
    except Exception as error:
        return error, traceback.format_exc(), None
