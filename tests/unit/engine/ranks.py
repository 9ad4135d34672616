"""Processes that are the shards of one group after another model: importing torch anew for each would take seconds.

with Ranks(2) as ranks:
    first, second = ranks.run(function, argument)  # function(group, argument) in both
"""

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

import torch

from shared.addresses import free_port
from tgi_server.engine.parallel import ShardGroup, connect

START_SECONDS = 180
ANSWER_SECONDS = 90
END_SECONDS = 5


class Ranks:
    """Every call runs in all processes at once."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.ended = False
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, port, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers(START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(END_SECONDS)
            process.kill()
            process.join()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Returns the results of `function(group, *arguments)` in all processes, and raises what it raises there."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        return self._answers(ANSWER_SECONDS)

    def run_alone(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a function in one process only."""
        self._pipes[rank].send((function, arguments))
        (answer,) = self._answers(ANSWER_SECONDS, [rank])
        return answer

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].join()

    def _answers(self, seconds: float, ranks: Sequence[int] | None = None) -> list[Any]:
        answers, deadline = [], time.monotonic() + seconds
        try:
            for rank in range(len(self._pipes)) if ranks is None else ranks:
                if not self._pipes[rank].poll(max(deadline - time.monotonic(), 0)):
                    raise TimeoutError(f"rank {rank} has not answered within {seconds} s")
                answers.append(self._pipes[rank].recv())
        except BaseException:  # pytest's own limit among them
            self.__exit__()  # a late answer would be taken for that to the next call
            raise
        for error, trace, _ in answers:
            if error is not None:
                error.add_note(trace)
                raise error
        return [result for _, _, result in answers]


def _serve(rank: int, count: int, port: int, pipe: Connection) -> None:
    group = connect(rank, count, "localhost", port, device=torch.device("cpu"), timeout=START_SECONDS)
    torch.set_num_threads(1)
    importlib.import_module("tests.unit.engine.requests")  # the engine, for which a busy machine takes half a minute
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
