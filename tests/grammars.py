"""Grammars compiled for the bundled model, as its shard does it."""

from functools import cache

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


async def no_fault(_: Grammar) -> tuple[str, ...]:
    return ()
