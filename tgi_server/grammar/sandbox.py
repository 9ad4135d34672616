"""A process in which a grammar from outside is tried: one that overflows its stack ends there, and nothing else."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
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

    grammar: None: the process answers as soon as it has read the tokenizer.
    """

    grammar: Grammar | None = None
    cpu_seconds: float = 0.0
    leniency: int = 0


class Outcome(msgspec.Struct):
    """The outcome of a trial. source: of a sound grammar, which takes `bytes`; None: `error` or `limit` says why.

    cpu_seconds: those that the trial took.
    """

    source: GrammarSource | None = None
    bytes: int = 0
    error: str = ""
    limit: str = ""
    cpu_seconds: float = 0.0


class Sandbox:
    """Tries one grammar after the other. Its process is started when it is needed, and again when it has died.

    For one thread, but for `close`. The process ends with the thread that started it.
    """

    def __init__(
        self,
        model: Path,
        vocab_size: int,
        eos: Sequence[int],
        niceness: int,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """niceness: of a trial; 0: as every other process, 19: only where nobody else wants to compute.

        memory_bytes: that trying a grammar may take.
        """
        arguments = (str(model), *map(str, (niceness, memory_bytes, vocab_size, *eos)))
        self._command = [sys.executable, "-m", "tgi_server.grammar.trial", *arguments]
        self._process: WorkerProcess | None = None
        self._closed = False
        self.cpu_seconds = 0.0  # that all trials have computed

    def start(self) -> None:
        """Has the process read the tokenizer, so that the first grammar need not wait. Returns when it has."""
        self._ask(Trial())

    def try_grammar(self, grammar: Grammar, cpu_seconds: float, leniency: int = 0) -> tuple[GrammarSource, int]:
        """Compiles the grammar and follows it for some steps. Returns its source, and the bytes that it may take.

        leniency: how much of it is left to the model from the beginning, as for `GrammarCompiler.compiled`.

        Raises InvalidGrammar with one line that says what is wrong, and SandboxLimit when it takes more than
        `cpu_seconds` of computing, or longer than somebody would wait.
        """
        trial = Trial(grammar, cpu_seconds, leniency)
        outcome = self._ask(trial) or self._ask(trial)
        if outcome is None:
            raise SandboxLimit("time")
        self.cpu_seconds += outcome.cpu_seconds
        if outcome.source is None:
            raise InvalidGrammar(outcome.error) if outcome.error else SandboxLimit(outcome.limit)
        return replace(outcome.source, leniency=leniency), outcome.bytes + GROWTH_BYTES

    def close(self) -> None:
        """Ends the process, and with it what is being tried; any thread may do so. There is no other one after it."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, trial: Trial) -> Outcome | None:
        """Returns the answer, or None when the process has died."""
        if self._closed:
            return None
        if self._process is None:
            # A group of its own: what stops the shard from a terminal is no business of that process, which ends with
            # the shard. The same session: Linux compares the niceness of one session's processes only.
            self._process = WorkerProcess(self._command, process_group=0)
        process = self._process
        try:
            send(process.tasks, trial)
            return receive(process.results, Outcome)
        except (BrokenPipeError, EOFError):
            process.kill()
            process.wait()
            self._process = None
            if not self._closed:
                logger.warning("the process that tries grammars has died; another one is started")
            return None
