"""A text that was cut, brought to an end: which shows that it was the beginning of a match."""

import random
from collections.abc import Sequence

import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from tgi_server.contract import Grammar
from tgi_server.grammar import Constraint, GrammarCompiler

_ENOUGH = 3_000
# What ends a value, or its first half; the earlier, the sooner the text does.
_CLOSING = '"@}],'


def completed(compiler: GrammarCompiler, grammar: Grammar, tokens: Sequence[int]) -> str:
    """The JSON text that begins with `tokens` and goes on as the grammar lets it, by the shortest way that is seen.

    Raises AssertionError when there is no way.
    """
    tokenizer = compiler.tokenizer
    compiler.check(grammar)
    constraint = compiler.constraint(grammar, tokens, _ENOUGH, ignore_eos=False)
    assert constraint.error is None, constraint.error
    closing = [*tokenizer.eos, *(tokenizer.encode(character)[0] for character in _CLOSING)]
    sure = len(tokenizer.eos) + 1
    chooser = random.Random(len(tokens))
    written = list(tokens)
    for _ in range(_ENOUGH):
        if constraint.ended:
            return tokenizer.decode([token for token in written if token not in tokenizer.eos])
        token = constraint.jump_forward
        if token is None:
            token = _shortest(constraint, closing, sure, chooser, tokenizer.lookup.vocab_size)
        constraint.advance(token, room=0)
        assert constraint.error is None, constraint.error
        written.append(token)
    raise AssertionError(f"{tokenizer.decode(written)!r} does not end")


def random_text(compiler: GrammarCompiler, grammar: Grammar, seed: int, tokens: int = 25) -> str:
    """A text that matches: some tokens that are drawn from those allowed, and then the shortest way to an end.

    Raises AssertionError when no end is found.
    """
    compiler.check(grammar)
    constraint = compiler.constraint(grammar, [], _ENOUGH, ignore_eos=False)
    chooser = random.Random(seed)
    written: list[int] = []
    while len(written) < tokens and not constraint.ended:
        token = constraint.jump_forward
        if token is None:
            token = chooser.choice(_allowed(constraint, compiler.tokenizer.lookup.vocab_size))
        constraint.advance(token, room=0)
        written.append(token)
    return completed(compiler, grammar, written)


def _allowed(constraint: Constraint, vocab_size: int) -> list[int]:
    bits = allocate_token_bitmask(1, vocab_size)
    fill_next_token_bitmask(constraint.matcher, bits)
    constraint.check()
    assert constraint.error is None, constraint.error
    allowed: list[int] = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")).tolist()
    assert allowed, "there is no token with which the text could go on"
    return allowed


def _shortest(constraint: Constraint, wanted: Sequence[int], sure: int, chooser: random.Random, vocab_size: int) -> int:
    allowed = _allowed(constraint, vocab_size)
    closing = next((token for token in wanted if token in allowed), None)
    stuck = closing not in wanted[:sure] and chooser.random() < 0.5  # inside a string that wants something else first
    return chooser.choice(allowed) if closing is None or stuck else closing
