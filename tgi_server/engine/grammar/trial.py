"""Tries grammars: the program that a `Sandbox` runs in a process of its own.

    python -m tgi_server.engine.grammar.trial MODEL NICENESS VOCAB_SIZE EOS...

Each line of standard input is a grammar, each line of standard output what became of it. The tokenizer is read once;
each grammar is then compiled and walked through by a child of this process, which the kernel ends when it takes more
time, memory or stack than it may. This process has one thread, so that a child is a whole copy of it.
"""

import json
import os
import random
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tgi_server.contract import Grammar, GrammarType
from tgi_server.engine.grammar.compiler import COMPILE_STACK_BYTES, GrammarCompiler, on_stack
from tgi_server.engine.grammar.errors import InvalidGrammar, reason

# A part of what a shard has for the same: no grammar that passes here comes near the end of a stack there.
_COMPILE_STACK_BYTES = COMPILE_STACK_BYTES // 4
_WALK_STACK_BYTES = 256 * 2**10  # the least of a shard's threads has 2 MiB
_MEMORY_BYTES = 512 * 2**20
_WALL_SECONDS = 10.0

_WALKS = 2
_WALKED_TOKENS = 24
_FAULTS = {
    signal.SIGSEGV: "its parts lie too deep inside each other",
    signal.SIGBUS: "its parts lie too deep inside each other",
    signal.SIGABRT: f"compiling it takes more than {_MEMORY_BYTES // 2**20} MiB of memory",
}
_LIMITS = {signal.SIGPROF: "cpu", signal.SIGALRM: "time"}


def main() -> None:
    model, niceness, vocab_size, *eos = sys.argv[1:]
    os.nice(int(niceness))
    compiler = GrammarCompiler(Path(model), int(vocab_size), list(map(int, eos)), stack_bytes=_COMPILE_STACK_BYTES)
    fault = None
    try:
        compiler.prepare()
    except InvalidGrammar as error:
        fault = {"error": str(error)}
    for line in sys.stdin.buffer:
        kind, value, text, cpu_seconds = json.loads(line)
        grammar = Grammar(GrammarType(kind), value, text)
        sys.stdout.write(f"{json.dumps(fault or _outcome(compiler, grammar, cpu_seconds))}\n")
        sys.stdout.flush()


def _outcome(compiler: GrammarCompiler, grammar: Grammar, cpu_seconds: float) -> dict[str, Any]:
    """Returns what a child finds, or why it ended before it could say."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _limit(cpu_seconds)
            outcome = json.dumps(_found(compiler, grammar)).encode()
            with open(write, "wb") as pipe:
                pipe.write(outcome)
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        if number in _LIMITS:
            return {"limit": _LIMITS[number]}
        return {"error": _FAULTS.get(number, "compiling it fails")}
    return json.loads(found) if found else {"error": _FAULTS[signal.SIGABRT]}


def _limit(cpu_seconds: float) -> None:
    """Bounds what this process may take. The default action of each signal ends it, whatever it does."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL_SECONDS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # where else the bound is that of the system
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + _COMPILE_STACK_BYTES + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the last words of a child are nobody's log line


def _found(compiler: GrammarCompiler, grammar: Grammar) -> dict[str, Any]:
    try:
        source = compiler.source(grammar)
        matcher = compiler.compile(source)
        on_stack(_WALK_STACK_BYTES, lambda: _walk(matcher, compiler.tokenizer.lookup.vocab_size))
    except InvalidGrammar as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": _FAULTS[signal.SIGABRT]}
    return {"text": source.text, "hints": list(source.hints.items())}


def _walk(matcher: LLMatcher, vocab_size: int) -> None:
    """Takes some steps as a shard would. Raises InvalidGrammar when the first of them cannot be taken."""
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
            copy.consume_token(chooser.choice(_allowed(bits)))


def _allowed(bits: Any) -> Sequence[int]:
    allowed: list[int] = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")).tolist()
    return allowed or [0]


if __name__ == "__main__":
    main()
