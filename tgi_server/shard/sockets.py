"""The paths of the Unix sockets on which shards listen."""

from pathlib import Path


def shard_socket(prefix: Path, rank: int) -> Path:
    """Returns the socket on which the shard of this rank serves its steps."""
    return prefix.with_name(f"{prefix.name}-{rank}")


def grammar_socket(socket: Path) -> Path:
    """Returns the socket on which the shard that serves its steps on `socket` compiles grammars."""
    return socket.with_name(f"{socket.name}-grammars")
