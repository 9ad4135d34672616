"""Tries clients' grammars in a separate process, so that a grammar that overflows its stack ends only that process."""

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
    """A task for the process: compile a grammar and take some steps.

    grammar: None asks for an answer as soon as the tokenizer has been read. cpu_seconds: limit of CPU time. leniency:
    level to begin with, see `enforced_schema`. niceness: of the process that tries it, 0 to 19. number: identifies the
    trial; its outcome has the same.
    """

    grammar: Grammar | None = None
    cpu_seconds: float = 0.0
    leniency: int = 0
    niceness: int = 0
    number: int = 0


class Outcome(msgspec.Struct):
    """The outcome of the trial with the same `number`.

    source: the compiled grammar's source; None if it failed. bytes: memory that the compiled grammar takes. error:
    one-line reason of a failure; limit: `cpu` or `time` if the trial exceeded it. cpu_seconds: CPU time of the trial.
    """

    source: GrammarSource | None = None
    bytes: int = 0
    error: str = ""
    limit: str = ""
    cpu_seconds: float = 0.0
    number: int = 0


class Sandbox:
    """Tries grammars in a process of its own, which is started when it is needed, and again when it has died.

    All methods are thread-safe. Trials of several threads run at the same time.
    """

    def __init__(self, model: Path, vocab_size: int, eos: Sequence[int], memory_bytes: int = MEMORY_BYTES) -> None:
        """memory_bytes: limit of one trial's memory."""
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
        """True until the process has given its first answer: it reads the tokenizer first."""
        return self._reading

    def start(self) -> None:
        """Starts the process and waits until it has read the tokenizer, so that the first grammar need not wait."""
        self._ask(Trial())

    def try_grammar(
        self,
        grammar: Grammar,
        cpu_seconds: float,
        leniency: int = 0,
        niceness: int = 0,
        pay: Callable[[float], None] = lambda seconds: None,
    ) -> tuple[GrammarSource, int]:
        """Compiles the grammar and takes some steps. Returns its source, and the bytes that it may grow to.

        leniency: the level to begin with, as in `GrammarCompiler.compiled`. niceness: as in `Trial`. pay: called with
        the CPU seconds that the trial took.

        Raises InvalidGrammar with a one-line reason, and SandboxLimit if the trial takes more than `cpu_seconds` of CPU
        time, takes longer than a client would wait, or its process dies twice.
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
        """Ends the process. Running trials, and later ones, start another process."""
        with self._lock:
            process, self._ended = self._process, self._process is not None
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the process and its trials, which raise SandboxLimit, as all later ones do."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # so that no thread writes to it any more
        with self._lock:
            process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _ask(self, trial: Trial) -> Outcome | None:
        """Returns the outcome of a trial; None if the process died first, or after `close`."""
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
        """Starts the process in a thread that lives as long as it: the process ends with the thread that started it."""
        started: Future[WorkerProcess] = Future()
        threading.Thread(target=self._run, args=(started,), name="grammar-trials", daemon=True).start()
        return started.result()

    def _run(self, started: "Future[WorkerProcess]") -> None:
        """Starts the process, and passes its outcomes to the threads that wait for them, until it ends."""
        try:
            # A process group of its own: Ctrl-C in a terminal does not reach the process, which ends with the shard.
            # The same session: Linux compares the niceness only of processes in one session.
            process = WorkerProcess(self._command, process_group=0)
        except Exception as error:  # raised in the thread that waits for the process
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
