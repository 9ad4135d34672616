"""Grammars compiled for the bundled model, as its shard does it."""

from functools import cache

from transformers import AutoConfig

from tgi_server import contract, demo_model
from tgi_server.engine.grammar import GrammarCompiler, InvalidGrammar
from tgi_server.router.messages import Grammar


@cache
def demo_compiler() -> GrammarCompiler:
    config = AutoConfig.from_pretrained(demo_model.PATH)
    return GrammarCompiler(demo_model.PATH, config.vocab_size, [config.eos_token_id])


def compiler_fault(grammar: Grammar) -> str | None:
    """Why the shards would refuse it."""
    try:
        demo_compiler().check(contract.Grammar(contract.GrammarType[grammar.type.name], grammar.value, grammar.text))
    except InvalidGrammar as error:
        return str(error)
    return None


async def no_fault(_: Grammar) -> None:
    return None
