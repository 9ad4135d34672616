"""The Unix sockets on which shards and router listen."""

import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tgi_server.launcher.errors import CannotStartError
from tgi_server.loading import remove_progress
from tgi_server.shard.sockets import grammar_socket, shard_socket

# Bytes that the kernel has for a socket's path (unix(7)).
MAX_PATH = 107


@contextmanager
def shard_sockets(path: Path | None, ranks: Iterable[int]) -> Iterator[list[Path]]:
    """Yields the paths PATH-0, PATH-1, ... of the sockets of these ranks, and removes the sockets in the end.

    Without a path they are in a folder of their own, which no other server and no other user has.
    Raises CannotStartError when another process listens on one of them.
    """
    folder = None if path else Path(tempfile.mkdtemp(prefix="text-generation-server-"))
    prefix = path or Path(str(folder)) / "shard"
    sockets = [shard_socket(prefix, rank) for rank in ranks]
    for each in sockets:
        _make_way(each)
        remove_progress(each)
    try:
        yield sockets
    finally:
        for each in sockets:
            each.unlink(missing_ok=True)
            grammar_socket(each).unlink(missing_ok=True)
            router_socket(each).unlink(missing_ok=True)
            remove_progress(each)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def router_socket(first_shard: Path) -> Path:
    """Returns the socket on which the router listens once it serves, beside that of its first shard."""
    return first_shard.with_name(f"{first_shard.name}-router")


def is_listening(path: Path) -> bool:
    """Returns True if a process accepts connections on the socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def _make_way(path: Path) -> None:
    """Removes the socket of a process that has ended. Raises CannotStartError when the path cannot be used."""
    if len(str(grammar_socket(path)).encode()) > MAX_PATH:
        raise CannotStartError(
            f"--shard-uds-path: {grammar_socket(path)} is longer than the {MAX_PATH} bytes of a socket's path; "
            "give a shorter one"
        )
    if not path.parent.is_dir():
        raise CannotStartError(f"--shard-uds-path: there is no folder {path.parent}; make it, or give another path")
    if not path.exists():
        return
    if not path.is_socket():
        raise CannotStartError(f"--shard-uds-path: {path} is there already, and is not a socket; give another path")
    if is_listening(path):
        raise CannotStartError(f"--shard-uds-path: another server listens on {path}; give each its own path")
    path.unlink()
