"""What can be wrong with a grammar."""

from tgi_server.engine.errors import EngineError


class InvalidGrammar(EngineError):
    """The grammar cannot be compiled, or asks for something that would not be enforced."""
