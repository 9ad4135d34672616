"""Grammars compiled for the bundled model, as its shard does it."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from transformers import AutoConfig

from tgi_server import demo_model
from tgi_server.contract import Grammar
from tgi_server.grammar import GrammarCompiler, InvalidGrammar


@cache
def demo_compiler() -> GrammarCompiler:
    config = AutoConfig.from_pretrained(demo_model.PATH)
    return GrammarCompiler(demo_model.PATH, config.vocab_size, [config.eos_token_id])


def compiler_fault(grammar: Grammar) -> str | None:
    """Returns why the shards would refuse it; None when they take it."""
    try:
        demo_compiler().check(grammar)
    except InvalidGrammar as error:
        return str(error)
    return None


def left_to_model(grammar: Grammar, compiler: GrammarCompiler | None = None) -> tuple[str, ...]:
    """Returns the constraints of a compiled grammar that are left to the model, each as a line."""
    found = (compiler or demo_compiler()).cache.find(grammar)
    assert found is not None
    return found.source.unenforced


async def no_fault(_: Grammar, _client: str) -> tuple[str, ...]:
    return ()


def following_fault(compiler: GrammarCompiler, grammar: Grammar, tokens: Sequence[int]) -> str | None:
    """Returns why the grammar does not let a model write these tokens and end there; None where it does.

    Tokens that the grammar forces must be those of the model, too.
    """
    compiler.check(grammar)
    constraint = compiler.constraint(grammar, [], len(tokens) + 1, ignore_eos=False)
    lookup = compiler.tokenizer.lookup
    mask = allocate_token_bitmask(1, lookup.vocab_size)
    for place, token in enumerate(tokens):
        written = f"{lookup.dbg_tokens([token])} behind {lookup.dbg_tokens(list(tokens[:place]))}"
        if constraint.ended:  # where nothing else can follow, the end has been taken already
            return None if token in constraint.eos and token == tokens[-1] else f"the text has ended before {written}"
        if constraint.jump_forward is None:
            fill_next_token_bitmask(constraint.matcher, mask)
            if not mask[0, token // 32] >> token % 32 & 1:
                return f"the mask forbids {written}"
        elif constraint.jump_forward != token:
            return f"{lookup.dbg_tokens([constraint.jump_forward])} is forced in place of {written}"
        constraint.advance(token, room=0)
        if constraint.error is not None:
            return f"{written}: {constraint.error}"
    return None if constraint.ended else "the text has not ended"


def takes(grammar: Grammar | None, *answer: str | int) -> bool:
    """Returns True if the demo model could write the answer, and end it there. Numbers are tokens."""
    assert grammar is not None
    assert compiler_fault(grammar) is None
    compiler = demo_compiler()
    matcher = compiler.constraint(grammar, [], 10_000, ignore_eos=False).matcher.deep_copy()
    matcher.reset()
    tokens = [
        token
        for part in answer
        for token in ([part] if isinstance(part, int) else compiler.tokenizer.lookup.tokenize_str(part))
    ]
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def preferring(grammar: Grammar | None, texts: Sequence[str | None], most: int = 300) -> str | None:
    """Returns what a model writes that wants the same at each place: the first of some texts that is allowed, or else
    the first token that is. None: the end. None is returned if it writes `most` tokens without an end.
    """
    assert grammar is not None
    assert compiler_fault(grammar) is None
    compiler = demo_compiler()
    constraint = compiler.constraint(grammar, [], most, ignore_eos=False)
    lookup = compiler.tokenizer.lookup
    mask = allocate_token_bitmask(1, lookup.vocab_size)
    wanted = [constraint.eos if text is None else lookup.tokenize_str(text)[:1] for text in texts]
    written: list[int] = []
    for _ in range(most):
        if (token := constraint.jump_forward) is None:
            fill_next_token_bitmask(constraint.matcher, mask)
            allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
            usual = int(allowed.argmax())
            token = next((each for choice in wanted for each in choice if allowed[each]), usual)
        constraint.advance(token, room=0)
        assert constraint.error is None
        written += [] if token in constraint.eos else [token]
        if constraint.ended:
            return compiler.tokenizer.decode(written)
    return None
