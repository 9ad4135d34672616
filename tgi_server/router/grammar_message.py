"""A grammar as the shards are told of it."""

from shared.stubs import generate_pb2 as pb
from tgi_server.router.messages import Grammar, GrammarType

_TYPES = {
    GrammarType.REGEX: pb.Grammar.REGEX,
    GrammarType.JSON_SCHEMA: pb.Grammar.JSON_SCHEMA,
    GrammarType.LARK: pb.Grammar.LARK,
}


def grammar_message(grammar: Grammar) -> pb.Grammar:
    return pb.Grammar(type=_TYPES[grammar.type], value=grammar.value, text=grammar.text)
