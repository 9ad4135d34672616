"""Errors of grammars. `str()` of one is a line for the client."""


class GrammarError(Exception):
    """Base of the errors of grammars."""


class InvalidGrammar(GrammarError):
    """The grammar cannot be compiled, or has a constraint that cannot be enforced."""


class NoRoomForGrammar(GrammarError):
    """The compiled grammars that requests need leave no room for another one."""


class SandboxLimit(GrammarError):
    """Compiling a grammar in the sandbox took too long.

    limit: `cpu`: it used up its CPU seconds; `time`: it waited too long for a CPU, or its process was ended.
    """

    def __init__(self, limit: str) -> None:
        super().__init__(f"compiling the grammar took too much {limit}")
        self.limit = limit


def reason(error: str) -> str:
    """Returns llguidance's message as one line, without positions in a grammar that the client did not write."""
    if error.startswith("NoExtension"):
        return "no text matches it"
    error = error.replace("<non-verbose/>", "").partition("while processing json-schema:")[0]
    error = error.replace("Unsatisfiable schema:", "no text matches it:")
    lines = [line.strip() for line in error.split("\n") if line.strip() and " | " not in line and line.strip() != "^"]
    return " ".join(lines) or "it is too complex"
