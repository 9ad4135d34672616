"""Text that has to match a regular expression, a JSON schema or a context-free grammar.

Start reading at `compiler.py`, which compiles the grammar of a request to a matcher. `constraint.py` applies a matcher
to one sequence, and `thoughts.py` enforces a reasoning budget. `sandbox.py` tries grammars of clients in a separate
process first. Nothing here needs torch, so that process does not load it.
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
