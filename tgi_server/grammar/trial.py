"""Tries grammars: the program that a `Sandbox` runs in a process of its own.

    python -m tgi_server.grammar.trial MODEL MEMORY_BYTES VOCAB_SIZE EOS...

It reads trials from its standard input and writes their outcomes to its standard output. It reads the tokenizer once,
then forks a child for each trial, which compiles the grammar and takes some steps. The kernel ends a child that exceeds
its limits of time, memory or stack. Children run concurrently. This process has one thread, as `fork` copies no other.
"""

import gc
import io
import os
import random
import resource
import selectors
import signal
import sys
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from shared.pipes import own_pipes, receive, send
from shared.processes import die_with_parent
from tgi_server.contract import Grammar
from tgi_server.grammar.compiler import COMPILE_STACK_BYTES, GrammarCompiler, on_stack
from tgi_server.grammar.errors import InvalidGrammar, reason
from tgi_server.grammar.sandbox import Outcome, Trial

# Less than a shard's stacks, so that no grammar that passes here comes near the end of a stack there.
_COMPILE_STACK_BYTES = COMPILE_STACK_BYTES // 4
_WALK_STACK_BYTES = 256 * 2**10  # the smallest stack of a shard's threads has 2 MiB
_WALL_SECONDS = 60.0
_PIPE_BYTES = 65_536

_WALKS = 2
_WALKED_TOKENS = 24
_TOO_DEEP = "it is nested too deep"
_TOO_LARGE = "compiling it takes too much memory"
_FAULTS = {signal.SIGSEGV: _TOO_DEEP, signal.SIGBUS: _TOO_DEEP, signal.SIGABRT: _TOO_LARGE}
_LIMITS = {signal.SIGPROF: "cpu", signal.SIGALRM: "time"}


def main() -> None:
    model, memory_bytes, vocab_size, *eos = sys.argv[1:]
    compiler = GrammarCompiler(Path(model), int(vocab_size), list(map(int, eos)), stack_bytes=_COMPILE_STACK_BYTES)
    tasks, results = own_pipes()
    tasks = io.BufferedReader(tasks.raw, 1)  # type: ignore[attr-defined]  # holds nothing back from the selector
    fault = ""
    try:
        _ = compiler.tokenizer  # which all trials share
    except InvalidGrammar as error:
        fault = str(error)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the memory that it shares with this process
    pipes = selectors.DefaultSelector()
    pipes.register(tasks, selectors.EVENT_READ)
    while True:
        for key, _ in pipes.select():
            if key.data is not None:
                if (outcome := key.data.read()) is not None:
                    pipes.unregister(key.fd)
                    os.close(key.fd)
                    send(results, outcome)
                continue
            try:
                trial = receive(tasks, Trial)
            except EOFError:
                return
            if trial.grammar is None or fault:
                send(results, Outcome(error=fault if trial.grammar else "", number=trial.number))
            else:
                child = _Child(compiler, trial, trial.grammar, int(memory_bytes))
                pipes.register(child.pipe, selectors.EVENT_READ, child)


class _Child:
    """A child process that tries a grammar. pipe: the file descriptor from which its outcome is read."""

    def __init__(self, compiler: GrammarCompiler, trial: Trial, grammar: Grammar, memory_bytes: int) -> None:
        self._number = trial.number
        self._found = b""
        self.pipe, write = os.pipe()
        bind = die_with_parent()
        self._process = os.fork()
        if self._process == 0:
            try:
                if bind is not None:
                    bind()
                _bound(trial, memory_bytes)
                encoded = msgspec.msgpack.encode(_found(compiler, grammar, trial.leniency))
                with open(write, "wb") as pipe:
                    pipe.write(encoded)
            finally:
                os._exit(0)
        os.close(write)

    def read(self) -> Outcome | None:
        """Reads from the pipe. At its end, returns the outcome, or the reason why the child ended without one."""
        if part := os.read(self.pipe, _PIPE_BYTES):
            self._found += part
            return None
        _, status, used = os.wait4(self._process, 0)
        outcome = _result(self._found, status)
        outcome.number, outcome.cpu_seconds = self._number, used.ru_utime + used.ru_stime
        return outcome


def _result(found: bytes, status: int) -> Outcome:
    """Returns the outcome that a child has written, or one with the reason why it could not. status: from `wait4`."""
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        if number in _LIMITS:
            return Outcome(limit=_LIMITS[number])
        return Outcome(error=_FAULTS.get(number, "compiling it fails"))
    return msgspec.msgpack.decode(found, type=Outcome) if found else Outcome(error=_TOO_LARGE)


def _bound(trial: Trial, memory_bytes: int) -> None:
    """Limits the time and memory of this process, and sets its niceness. The signals of the limits end it.

    Called in the child, so that its parent keeps niceness 0 and starts children at once on a busy machine.
    """
    os.nice(trial.niceness)
    for number in _LIMITS:
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, trial.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # on other systems, only the system's own limit applies
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _COMPILE_STACK_BYTES + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # do not log what a dying child prints


def _found(compiler: GrammarCompiler, grammar: Grammar, leniency: int) -> Outcome:
    before = _own_bytes()
    try:
        source, matcher = compiler.compiled(grammar, leniency)
        on_stack(_WALK_STACK_BYTES, lambda: _walk(matcher, compiler.tokenizer.lookup.vocab_size))
    except InvalidGrammar as error:
        return Outcome(error=str(error))
    except (MemoryError, RuntimeError):  # the latter: there is no room for a thread
        return Outcome(error=_TOO_LARGE)
    return Outcome(source, max(0, _own_bytes() - before))


def _own_bytes() -> int:
    """Returns the bytes of this process's resident memory that no file backs. macOS: the peak of resident memory."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * resource.getpagesize()


def _walk(matcher: LLMatcher, vocab_size: int) -> None:
    """Takes some random steps as a shard would. Raises InvalidGrammar if the first of them fails."""
    bits = allocate_token_bitmask(1, vocab_size)
    for walk in range(_WALKS):
        chooser = random.Random(walk)
        copy = matcher.deep_copy()
        for step in range(_WALKED_TOKENS):
            if following := copy.compute_ff_tokens():
                copy.consume_tokens(following)
            fill_next_token_bitmask(copy, bits)
            if copy.is_error():
                if step == 0:
                    raise InvalidGrammar(reason(copy.get_error()))
                break
            if copy.is_stopped():
                break
            allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
            if not len(allowed):
                break
            copy.consume_token(int(allowed[chooser.randrange(len(allowed))]))


if __name__ == "__main__":
    main()
