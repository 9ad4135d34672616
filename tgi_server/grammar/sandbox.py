"""A process in which a grammar from outside is tried: one that overflows its stack ends there, and nothing else."""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shared.processes import die_with_parent
from tgi_server.contract import Grammar
from tgi_server.grammar.compiled import GROWTH_BYTES, GrammarSource
from tgi_server.grammar.errors import InvalidGrammar, SandboxLimit

logger = logging.getLogger(__name__)

MEMORY_BYTES = 512 * 2**20


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
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.cpu_seconds = 0.0  # that all trials have computed

    def start(self) -> None:
        """Has the process read the tokenizer, so that the first grammar need not wait. Returns when it has."""
        self._ask(b"\n")

    def try_grammar(self, grammar: Grammar, cpu_seconds: float, leniency: int = 0) -> tuple[GrammarSource, int]:
        """Compiles the grammar and follows it for some steps. Returns its source, and the bytes that it may take.

        leniency: how much of it is left to the model from the beginning, as for `GrammarCompiler.compiled`.

        Raises InvalidGrammar with one line that says what is wrong, and SandboxLimit when it takes more than
        `cpu_seconds` of computing, or longer than somebody would wait.
        """
        values = (grammar.type.value, grammar.value, grammar.text, grammar.frame, grammar.lenient)
        line = json.dumps([*values, leniency, cpu_seconds]).encode() + b"\n"
        outcome = self._ask(line) or self._ask(line)
        if outcome is None:
            raise SandboxLimit("time")
        self.cpu_seconds += outcome.get("cpu_seconds", 0.0)
        if "error" in outcome:
            raise InvalidGrammar(outcome["error"])
        if "limit" in outcome:
            raise SandboxLimit(outcome["limit"])
        hints = dict(map(tuple, outcome["hints"]))
        source = GrammarSource(outcome["text"], hints, tuple(outcome["unenforced"]), leniency)
        return source, outcome["bytes"] + GROWTH_BYTES

    def close(self) -> None:
        """Ends the process, and with it what is being tried; any thread may do so. There is no other one after it."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        """Returns the answer, or None when the process has died."""
        if self._closed:
            return None
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            process.kill()
            process.communicate()
            self._process = None
            if not self._closed:
                logger.warning("the process that tries grammars has died; another one is started")
            return None
        outcome: dict[str, Any] = json.loads(answer)
        return outcome

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # A group of its own: what stops the shard from a terminal is no business of that process, which ends with
            # the shard. The same session: Linux compares the niceness of one session's processes only.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                process_group=0,
                preexec_fn=die_with_parent(),
            )
        return self._process
