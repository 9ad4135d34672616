"""A process in which a grammar from outside is tried: one that overflows its stack ends there, and nothing else."""

import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tgi_server.contract import Grammar
from tgi_server.engine.grammar.compiler import GrammarSource
from tgi_server.engine.grammar.errors import InvalidGrammar, SandboxLimit

logger = logging.getLogger(__name__)


class Sandbox:
    """Tries one grammar after the other. Its process is started when it is needed, and again when it has died.

    Not thread-safe.
    """

    def __init__(self, model: Path, vocab_size: int, eos: Sequence[int], niceness: int) -> None:
        """niceness: of its process; 0: as every other, 19: only where nobody else wants to compute."""
        arguments = (str(model), str(niceness), str(vocab_size), *map(str, eos))
        self._command = [sys.executable, "-m", "tgi_server.engine.grammar.trial", *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Has the process read the tokenizer, so that the first grammar need not wait for it."""
        self._running()

    def try_grammar(self, grammar: Grammar, cpu_seconds: float) -> GrammarSource:
        """Returns the grammar as llguidance takes it, once it has been seen to compile and to be followed.

        Raises InvalidGrammar with one line that says what is wrong, and SandboxLimit when it takes more than
        `cpu_seconds` of computing, or longer than somebody would wait.
        """
        line = json.dumps([grammar.type.value, grammar.value, grammar.text, cpu_seconds]).encode() + b"\n"
        outcome = self._ask(line) or self._ask(line)
        if outcome is None:
            raise InvalidGrammar("the process that compiles it ends")
        if "error" in outcome:
            raise InvalidGrammar(outcome["error"])
        if "limit" in outcome:
            raise SandboxLimit(outcome["limit"])
        return GrammarSource(outcome["text"], dict(map(tuple, outcome["hints"])))

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        """Returns the answer, or None when the process has died."""
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
            self.close()
            logger.warning("the process that tries grammars has died; the next one is started")
            return None
        outcome: dict[str, Any] = json.loads(answer)
        return outcome

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            # In a session of its own: what stops the shard from a terminal is no business of that process, which ends
            # when its standard input does.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        return self._process
