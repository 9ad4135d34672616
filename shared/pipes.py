"""Processes that are sent messages over pipes, and answer them.

A message is preceded by its size in eight bytes, and followed by the bytes that it announces.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from struct import Struct
from typing import Any, BinaryIO, TypeVar, cast

import msgspec

from shared.processes import die_with_parent

_SIZE = Struct("<Q")

M = TypeVar("M")


class WorkerProcess(subprocess.Popen[bytes]):
    """A process that answers messages. It ends with the thread that started it."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """options: others of Popen."""
        pipe = subprocess.PIPE
        super().__init__(command, stdin=pipe, stdout=pipe, preexec_fn=die_with_parent(), **options)
        self.tasks, self.results = cast(BinaryIO, self.stdin), cast(BinaryIO, self.stdout)


def own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns the pipes of a worker process, for tasks and for results. What libraries print goes to standard error."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return sys.stdin.buffer, results


def send(stream: BinaryIO, message: msgspec.Struct, *parts: Any) -> None:
    """Writes a message, and the bytes that follow it."""
    encoded = msgspec.msgpack.encode(message)
    for part in (_SIZE.pack(len(encoded)), encoded, *parts):
        stream.write(part)
    stream.flush()


def receive(stream: BinaryIO, kind: type[M]) -> M:
    """Returns the next message. Raises EOFError if the other end has closed the pipe."""
    (size,) = _SIZE.unpack(read(stream, _SIZE.size))
    return msgspec.msgpack.decode(read(stream, size), type=kind)


def read(stream: BinaryIO, size: int) -> bytes:
    """Returns this many bytes. Raises EOFError if the other end has closed the pipe."""
    data = stream.read(size)
    if len(data) < size:
        raise EOFError("the other end has closed the pipe")
    return data
