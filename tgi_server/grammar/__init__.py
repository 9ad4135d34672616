"""Text that has to match a regular expression, a JSON schema or a context-free grammar.

Start reading at `compiler.py`: what a request asks for becomes a matcher. `constraint.py` is one sequence's matcher at
work, and `thoughts.py` the budget of its thoughts. Grammars from outside are tried in a process of its own before:
`sandbox.py`. Nothing here needs torch, which that process has no use for.
"""

from tgi_server.grammar.compiler import GrammarCompiler
from tgi_server.grammar.constraint import Constraint
from tgi_server.grammar.errors import GrammarError, InvalidGrammar, NoRoomForGrammar, SandboxLimit
from tgi_server.grammar.sandbox import Sandbox
from tgi_server.grammar.thoughts import LimitedThoughts

__all__ = [
    "Constraint",
    "GrammarCompiler",
    "GrammarError",
    "InvalidGrammar",
    "LimitedThoughts",
    "NoRoomForGrammar",
    "Sandbox",
    "SandboxLimit",
]
