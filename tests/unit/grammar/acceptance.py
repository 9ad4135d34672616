"""Says if a model may generate a text under a grammar."""

from tgi_server.contract import Grammar
from tgi_server.grammar import GrammarCompiler

_ENOUGH = 100_000


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Returns True if `text`, and then its end, may be generated. Raises InvalidGrammar."""
    tokenizer = compiler.tokenizer
    compiler.check(grammar)
    constraint = compiler.constraint(grammar, [], _ENOUGH, ignore_eos=False)
    rest = text.encode()
    while True:
        token = constraint.jump_forward
        if token is None:
            token = tokenizer.lookup.tokenize_bytes(rest)[0] if rest else tokenizer.eos[0]
        advance = constraint.advance(token, room=0)
        if constraint.error is not None:
            return False
        if token in tokenizer.eos:
            return not rest
        if 0 not in advance.hidden:
            spelling = tokenizer.lookup.decode_bytes([token])
            if not rest.startswith(spelling):
                return False
            rest = rest.removeprefix(spelling)
        if constraint.ended:
            return not rest
