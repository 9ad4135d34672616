"""A process in which grammars from outside are tried: one that overflows its stack ends there, and nothing else."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec

from shared.pipes import WorkerProcess, receive, send
from tgi_server.contract import Grammar
from tgi_server.grammar.compiled import GROWTH_BYTES, GrammarSource
from tgi_server.grammar.errors import InvalidGrammar, SandboxLimit

logger = logging.getLogger(__name__)

MEMORY_BYTES = 512 * 2**20


class Trial(msgspec.Struct):
    """A grammar to try, within CPU seconds. leniency: how much of it is left to the model from the beginning.

    number: what the outcome has as well. niceness: 0: as every other process, 19: only where nobody else wants to
    compute. grammar: None: the process answers as soon as it has read the tokenizer.
    """

    grammar: Grammar | None = None
    cpu_seconds: float = 0.0
    leniency: int = 0
    niceness: int = 0
    number: int = 0


class Outcome(msgspec.Struct):
    """The outcome of a trial. source: of a sound grammar, which takes `bytes`; None: `error` or `limit` says why.

    number: of the trial. cpu_seconds: the CPU time that it took.
    """

    source: GrammarSource | None = None
    bytes: int = 0
    error: str = ""
    limit: str = ""
    cpu_seconds: float = 0.0
    number: int = 0


class Sandbox:
    """Tries grammars, as many at once as threads ask. Its process is started when it is needed, and again when it has
    died.
    """

    def __init__(self, model: Path, vocab_size: int, eos: Sequence[int], memory_bytes: int = MEMORY_BYTES) -> None:
        """memory_bytes: that trying a grammar may take."""
        arguments = (str(model), *map(str, (memory_bytes, vocab_size, *eos)))
        self._command = [sys.executable, "-m", "tgi_server.grammar.trial", *arguments]
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._closed = False
        self._ended = False  # the process was ended on purpose
        self._reading = True
        self._numbers = count()
        self._answers: dict[int, Future[Outcome | None]] = {}

    @property
    def reading(self) -> bool:
        """True from the start of a process until its first answer: it reads the tokenizer, before all trials."""
        return self._reading

    def start(self) -> None:
        """Has the process read the tokenizer, so that the first grammar need not wait. Returns when it has."""
        self._ask(Trial())

    def try_grammar(
        self,
        grammar: Grammar,
        cpu_seconds: float,
        leniency: int = 0,
        niceness: int = 0,
        pay: Callable[[float], None] = lambda seconds: None,
    ) -> tuple[GrammarSource, int]:
        """Compiles the grammar and follows it for some steps. Returns its source, and the bytes that it may take.

        leniency: how much of it is left to the model from the beginning, as for `GrammarCompiler.compiled`.
        niceness: as in `Trial`. pay: is given the CPU seconds that it took.

        Raises InvalidGrammar with one line that says what is wrong, and SandboxLimit when it takes more than
        `cpu_seconds` of computing, or longer than a client would wait.
        """
        trial = Trial(grammar, cpu_seconds, leniency, niceness)
        outcome = self._ask(trial) or self._ask(trial)
        if outcome is None:
            raise SandboxLimit("time")
        pay(outcome.cpu_seconds)
        if outcome.source is None:
            raise InvalidGrammar(outcome.error) if outcome.error else SandboxLimit(outcome.limit)
        return replace(outcome.source, leniency=leniency), outcome.bytes + GROWTH_BYTES

    def end_process(self) -> None:
        """Ends the process, until it is needed again. What is being tried is tried again there."""
        with self._lock:
            process, self._ended = self._process, self._process is not None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process, and with it what is being tried; any thread may do so. There is no other one after it."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # so that no thread writes to it any more
        with self._lock:
            process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _ask(self, trial: Trial) -> Outcome | None:
        """Returns the answer, or None when the process has died."""
        answer: Future[Outcome | None] = Future()
        with self._lock:
            if self._closed:
                return None
            if self._process is None:
                self._process = self._started()
            trial.number = next(self._numbers)
            self._answers[trial.number] = answer
            with suppress(BrokenPipeError):
                send(self._process.tasks, trial)
        return answer.result()

    def _started(self) -> WorkerProcess:
        """Starts the process in a thread that lives as long as it does: it would end with any other."""
        started: Future[WorkerProcess] = Future()
        threading.Thread(target=self._run, args=(started,), name="grammar-trials", daemon=True).start()
        return started.result()

    def _run(self, started: "Future[WorkerProcess]") -> None:
        """Starts the process, and hands out its answers until it ends."""
        try:
            # A group of its own: what stops the shard from a terminal does not concern that process, which ends with
            # the shard. The same session: Linux compares the niceness of one session's processes only.
            process = WorkerProcess(self._command, process_group=0)
        except Exception as error:  # whatever it is, who waits for the process has to learn of it
            started.set_exception(error)
            return
        self._reading = True
        started.set_result(process)
        with suppress(EOFError):
            while True:
                outcome = receive(process.results, Outcome)
                self._reading = False
                self._answers.pop(outcome.number).set_result(outcome)
        process.kill()
        process.wait()
        with self._lock:
            self._process, ended, self._ended = None, self._ended, False
            unanswered, self._answers = self._answers, {}
        if not (self._closed or ended):
            logger.warning("the process that tries grammars has died; starting another one")
        for answer in unanswered.values():
            answer.set_result(None)
