"""The names of the sockets on which a shard listens."""

from pathlib import Path

_GRAMMARS = "-grammars"


def grammar_socket(socket: Path) -> Path:
    """Where the shard that serves its steps on `socket` compiles grammars."""
    return socket.with_name(socket.name + _GRAMMARS)
