"""Weights that are copied from a file into huge pages, and their places in the file.

A model that sleeps gives the copies up, and reads them from the same places when it wakes (`sleep.py`).
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shared.control_groups import usable_cores
from tgi_server.engine.memory_map import Mappings

# Bytes of what a thread reads or writes at once, of a cache's line, and of the least weight that is read by threads.
_PIECE, _LINE, _LEAST = 8 << 20, 64, 256 << 10


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it was at one time. Files of weights get their names when they are complete, and never change after."""

    device: int
    number: int
    size: int
    changed_ns: int

    @classmethod
    def of(cls, file: int | Path) -> Self:
        """Raises OSError."""
        status = os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class StoredPlace:
    """The first byte of a weight in a file."""

    path: Path
    state: FileState
    offset: int


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A range of this process's memory, and its offset in a file. file: a descriptor."""

    address: int
    size: int
    file: int
    offset: int

    def cut(self) -> Iterator["FilePiece"]:
        for start in range(0, self.size, _PIECE):
            yield FilePiece(self.address + start, min(_PIECE, self.size - start), self.file, self.offset + start)

    @property
    def memory(self) -> memoryview:
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


def move(call: Callable[[int, list[memoryview], int], int], pieces: Iterable[FilePiece]) -> None:
    """Reads or writes pieces, with one thread per core. call: os.preadv or os.pwritev. Raises OSError."""

    def move_one(piece: FilePiece) -> None:
        memory, done = piece.memory, 0
        while done < piece.size:
            moved = call(piece.file, [memory[done:]], piece.offset + done)
            if not moved:
                raise OSError("a file with weights ends early")
            done += moved

    with ThreadPoolExecutor(usable_cores()) as threads:
        for _ in threads.map(move_one, [part for piece in pieces for part in piece.cut()]):
            pass


_places = WeakTensorKeyDictionary()


class _UnreadCopies:
    """Copies of weights of a file that is mapped, side by side in huge pages. Their contents are read in the end."""

    def __init__(self, path: Path, file: int) -> None:
        """file: the descriptor of the file. Raises OSError."""
        self._path, self._file, self._state = path, file, FileState.of(file)
        # What is not used takes no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, max(1, self._state.size), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0
        self._originals: list[tuple[Tensor, Tensor]] = []  # copies, each with the weight in the mapped file
        self._unread: list[tuple[Tensor, Tensor]] = []  # those without contents

    def add(self, weight: Tensor) -> Tensor:
        """Returns the copy of a weight. If it is large, it has no contents yet."""
        if weight.nbytes < _LEAST or self._used + weight.nbytes > len(self._memory):
            copy: Tensor = torch.ops.oatmill.linear_copy(weight)
            self._originals.append((copy, weight))
            return copy
        memory = torch.frombuffer(self._memory, dtype=torch.uint8, count=weight.nbytes, offset=self._used)
        self._used += -(-weight.nbytes // _LINE) * _LINE
        copy = memory.view(weight.dtype).view(weight.shape)
        self._originals.append((copy, weight))
        self._unread.append((copy, weight))
        return copy

    def read(self) -> None:
        """Reads the contents, and notes the places in the file, if they are known. Raises OSError."""
        try:
            memory, name = Mappings.now(), os.readlink(f"/proc/self/fd/{self._file}")
        except OSError:  # no Linux
            memory, name = Mappings(()), ""
        for copy, weight in self._originals:
            if (offset := memory.offset_in(name, weight.data_ptr(), weight.nbytes)) is not None:
                _places[copy] = StoredPlace(self._path, self._state, offset)
        pieces = []
        for copy, weight in self._unread:
            if (place := place_of(copy)) is None:
                copy.copy_(weight)
            else:
                pieces.append(FilePiece(copy.data_ptr(), copy.nbytes, self._file, place.offset))
        move(os.preadv, pieces)


_copies: ContextVar[_UnreadCopies | None] = ContextVar("copies", default=None)


def copy_of_stored(weight: Tensor) -> Tensor:
    """Returns a copy in huge pages of a packed weight, which may lie in a file, in small pages.

    While a file is read (`copied_from`) the copy has its contents only at the end.
    """
    if (copies := _copies.get()) is not None:
        return copies.add(weight)
    copy: Tensor = torch.ops.oatmill.linear_copy(weight)
    return copy


@contextmanager
def copied_from(path: Path, file: int) -> Iterator[None]:
    """Copies the weights that the block copies from a file, which it maps, in its end; and notes their places.

    Threads read them, for the first use of memory takes longer than the copying. file: the descriptor. Raises OSError.
    """
    copies = _UnreadCopies(path, file)
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)
    copies.read()


def place_of(weight: Tensor) -> StoredPlace | None:
    """Returns where the bytes of a weight are stored, if that is known."""
    place: StoredPlace | None = _places.get(weight)
    return place
