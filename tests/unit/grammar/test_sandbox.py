"""A grammar that harms the process that compiles it harms only a process of the sandbox."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tests import hostile_grammars as hostile
from tests.grammars import demo_compiler
from tgi_server import demo_model
from tgi_server.contract import Grammar
from tgi_server.grammar import InvalidGrammar, Sandbox, SandboxLimit
from tgi_server.grammar.compiled import CompiledGrammar
from tgi_server.grammar.compiler import on_stack

SECONDS = 2.0
WALK_STACK_BYTES = 256 * 2**10

# Deeper than the stack of a thread, 8 MB, is for compiling: some 5 KB are taken for each level.
DEEP = {
    "references": hostile.schema(hostile.references(2_000)),
    "arrays": hostile.schema(hostile.arrays(1_000)),
    "rules": hostile.lark(hostile.rules(2_750)),
    "rules with something before": hostile.lark(hostile.rules(2_000, '"a" NEXT')),
    "rules with something behind": hostile.lark(hostile.rules(2_000, 'NEXT "a"')),
    "rules with a choice": hostile.lark(hostile.rules(1_500, '"a" NEXT | "b" NEXT "c"')),
}


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox(demo_model.PATH, 3072, [1])
    yield sandbox
    sandbox.close()


@pytest.mark.parametrize(
    "grammar",
    [
        pytest.param(hostile.schema(hostile.references(20_000)), marks=pytest.mark.slow),
        pytest.param(hostile.lark(hostile.rules(20_000)), marks=pytest.mark.slow),
        hostile.schema(hostile.spans(5_000)),
    ],
    ids=["references", "rules", "spans"],
)
def test_a_grammar_that_overflows_a_stack_is_refused_and_the_next_is_tried(sandbox: Sandbox, grammar: Grammar) -> None:
    with pytest.raises(InvalidGrammar, match="too deep"):
        sandbox.try_grammar(grammar, SECONDS)
    assert sandbox.try_grammar(hostile.regex("[a-z]+"), SECONDS)[0].text


def test_a_trial_that_takes_too_long_is_ended(sandbox: Sandbox) -> None:
    started = time.perf_counter()
    with pytest.raises(SandboxLimit):
        sandbox.try_grammar(hostile.regex(hostile.optional_letters(300_000)), 0.25)
    assert time.perf_counter() - started < 8
    assert sandbox.try_grammar(hostile.regex("[a-z]+"), SECONDS)[0].text


def test_definitions_that_all_refer_to_each_other_are_walked_once(sandbox: Sandbox) -> None:
    assert sandbox.try_grammar(hostile.schema(hostile.mutual(11)), SECONDS)[0].text


def test_a_grammar_that_takes_too_much_memory_is_refused() -> None:
    small = Sandbox(demo_model.PATH, 3072, [1], memory_bytes=16 * 2**20)
    with pytest.raises(InvalidGrammar, match="memory"):
        small.try_grammar(hostile.regex("|".join(f"a{i}" for i in range(90_000))), 60)
    assert small.try_grammar(hostile.regex("[a-z]+"), SECONDS)[0].text
    small.close()


def test_grammars_are_tried_side_by_side(sandbox: Sandbox) -> None:
    sandbox.start()
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(sandbox.try_grammar, hostile.regex(hostile.optional_letters(300_000)), 2.0)
        assert sandbox.try_grammar(hostile.regex("[a-z]+"), SECONDS)[0].text
        assert not long.done()
        assert isinstance(long.exception(), SandboxLimit)


def test_a_process_that_dies_is_replaced() -> None:
    before = psutil.Process().children()
    sandbox = Sandbox(demo_model.PATH, 3072, [1])
    sandbox.start()
    (process,) = set(psutil.Process().children()) - set(before)
    process.kill()
    process.wait()
    assert sandbox.try_grammar(hostile.regex("[a-z]+"), SECONDS)[0].text
    sandbox.close()
    assert set(psutil.Process().children()) <= set(before)


_TRIES_FOR_LONG = """
from tests import hostile_grammars as hostile
from tgi_server import demo_model
from tgi_server.grammar import Sandbox

sandbox = Sandbox(demo_model.PATH, 3072, [1])
sandbox.start()
print("started", flush=True)
sandbox.try_grammar(hostile.regex(hostile.optional_letters(300_000)), 60)
"""


@pytest.mark.parametrize("trying", [False, True], ids=["while it starts", "while it tries a grammar"])
def test_the_process_ends_with_its_parent(trying: bool) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _TRIES_FOR_LONG], stdout=subprocess.PIPE)
    try:
        if trying:
            assert parent.stdout is not None
            parent.stdout.readline()
        while len(children := psutil.Process(parent.pid).children(recursive=True)) < 1 + trying:
            assert parent.poll() is None
            time.sleep(0.001)
    finally:
        parent.kill()
        parent.wait()
    assert psutil.wait_procs(children, timeout=SECONDS)[1] == []


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name.startswith("rules with ") else ()) for name in DEEP],
)
def test_what_passes_is_safe_to_compile_and_its_steps_need_little_stack(sandbox: Sandbox, name: str) -> None:
    """Every step of a long text, in a thread with an eighth of the stack of those that compute masks."""
    compiler = demo_compiler()
    source, size = sandbox.try_grammar(DEEP[name], SECONDS)
    compiler.cache.add(DEEP[name], CompiledGrammar(source, compiler.compile(source), size))
    bits = allocate_token_bitmask(1, compiler.tokenizer.lookup.vocab_size)

    def walk(choice: float) -> None:
        constraint = compiler.constraint(DEEP[name], [], 3_000, ignore_eos=True)
        for _ in range(3_000):
            token = constraint.jump_forward
            if token is None:
                fill_next_token_bitmask(constraint.matcher, bits)
                constraint.check()
                allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little"))
                if constraint.error is not None or not len(allowed):
                    return
                token = int(allowed[int(choice * (len(allowed) - 1))])
            constraint.advance(token, room=32)
            if constraint.ended or constraint.error is not None:
                return

    for choice in (0.0, 0.3, 0.5, 0.7, 1.0):
        on_stack(WALK_STACK_BYTES, lambda choice=choice: walk(choice))


def test_the_process_needs_no_torch() -> None:
    program = "import sys, tgi_server.grammar.trial; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
