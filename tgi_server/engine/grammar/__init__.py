"""Text that has to match a regular expression, a JSON schema or a context-free grammar.

Start reading at `compiler.py`: what a request asks for becomes a matcher. `constraint.py` is one sequence's matcher at
work, `masks.py` what the sampler is told of it. Grammars from outside are tried in a process of its own before:
`sandbox.py`. Importing this package does not import torch, which that process has no use for.
"""

from tgi_server.engine.grammar.compiler import GrammarCompiler
from tgi_server.engine.grammar.constraint import Constraint
from tgi_server.engine.grammar.errors import InvalidGrammar, NoRoomForGrammar, SandboxLimit
from tgi_server.engine.grammar.sandbox import Sandbox

__all__ = ["Constraint", "GrammarCompiler", "InvalidGrammar", "NoRoomForGrammar", "Sandbox", "SandboxLimit"]
