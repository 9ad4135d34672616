"""Anonymous shared memory, through which processes of one machine pass bytes without a copy.

The memory belongs to a descriptor of the process that made it (memfd_create, Linux). Another process of the same user
opens it by the number of the descriptor, below /proc. The system frees it when the last process that has it open or
mapped closes it or ends, even if it is killed.
"""

import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

# Where each part begins, so that it can be mapped alone.
_ALIGNMENT = mmap.ALLOCATIONGRANULARITY
# Seals of memory that no process, its maker included, can change or shorten while another one has mapped it.
_SEALS = (
    getattr(fcntl, "F_SEAL_SEAL", 0)
    | getattr(fcntl, "F_SEAL_SHRINK", 0)
    | getattr(fcntl, "F_SEAL_GROW", 0)
    | getattr(fcntl, "F_SEAL_WRITE", 0)
)


@dataclass(frozen=True, slots=True)
class MemoryPlace:
    """A file descriptor of a process, by which others can open the memory. inode: detects reused descriptors."""

    process: int
    descriptor: int
    inode: int


class SharedMemory:
    """Memory that is open in this process, for as long as this object lives. place: for other processes."""

    __slots__ = ("_descriptor", "place")

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.place = MemoryPlace(os.getpid(), descriptor, os.fstat(descriptor).st_ino)

    @classmethod
    def of(cls, parts: Sequence[memoryview | bytes]) -> "list[SharedBytes]":
        """Copies some buffers into one new memory. Raises OSError if the system does not support it."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name")
        memory = cls(os.memfd_create("oatmill", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        shared, start = [], 0
        for part in parts:
            view = memoryview(part).cast("B")
            written = 0
            while written < len(view):
                written += os.pwrite(memory._descriptor, view[written:], start + written)
            shared.append(SharedBytes(memory.place, start, len(view), memory))
            start += -(-len(view) // _ALIGNMENT) * _ALIGNMENT
        fcntl.fcntl(memory._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return shared

    @classmethod
    def open(cls, place: MemoryPlace) -> Self:
        """Opens the memory of another process. Raises OSError if it is gone, or could change."""
        # A number may have come to mean something else, which must not be waited for.
        path = f"/proc/{place.process}/fd/{place.descriptor}"
        memory = cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        found = os.fstat(memory._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_ino != place.inode:
            raise OSError("its memory is gone")
        if fcntl.fcntl(memory._descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("its memory is not sealed")
        return memory

    def map(self, start: int, size: int) -> mmap.mmap:
        """Returns a part, which stays mapped for as long as the returned object lives. Raises OSError or ValueError.

        Writes to it are private to this object.
        """
        return mmap.mmap(
            self._descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE, offset=start
        )

    def __del__(self) -> None:
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class SharedBytes:
    """A part of a memory. memory: None in a process that has not opened it."""

    place: MemoryPlace
    start: int
    size: int
    memory: SharedMemory | None = None

    def __len__(self) -> int:
        return self.size

    def map(self) -> mmap.mmap:
        """Returns the bytes, without a copy. Raises OSError or ValueError if they are gone."""
        return (self.memory or SharedMemory.open(self.place)).map(self.start, self.size)
