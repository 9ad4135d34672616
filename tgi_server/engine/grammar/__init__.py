"""Text that has to match a regular expression, a JSON schema or a context-free grammar.

Start reading at `compiler.py`: what a request asks for becomes a matcher. `constraint.py` is one sequence's matcher at
work, `masks.py` what the sampler is told of it.
"""

from tgi_server.engine.grammar.compiler import GrammarCompiler
from tgi_server.engine.grammar.constraint import Constraint
from tgi_server.engine.grammar.errors import InvalidGrammar
from tgi_server.engine.grammar.masks import MaskBuilder, PendingMask

__all__ = ["Constraint", "GrammarCompiler", "InvalidGrammar", "MaskBuilder", "PendingMask"]
