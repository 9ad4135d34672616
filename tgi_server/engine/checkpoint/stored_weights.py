"""Weights that are copied from a file into huge pages, and their places in the file.

A model that falls asleep frees the copies, and reads them from the same places when it wakes (`sleep.py`).
"""

import ctypes
import mmap
import os
import zlib
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
from tgi_server.engine.checkpoint.checksums import Checksums
from tgi_server.engine.memory_map import Mappings

# Bytes that a thread reads or writes at once; the same with a checksum, few enough for a core's cache; and bytes of a
# cache line.
_PIECE, _CHECKED_PIECE, _LINE = 8 << 20, 1 << 20, 64
# Minimum bytes of a weight that is read by threads.
LEAST = 256 << 10


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

    def cut(self, size: int = _PIECE) -> Iterator["FilePiece"]:
        for start in range(0, self.size, size):
            yield FilePiece(self.address + start, min(size, self.size - start), self.file, self.offset + start)

    def move(self, call: Callable[[int, list[memoryview], int], int]) -> None:
        """Reads or writes it. call: os.preadv or os.pwritev. Raises OSError."""
        memory, done = self.memory, 0
        while done < self.size:
            moved = call(self.file, [memory[done:]], self.offset + done)
            if not moved:
                raise OSError("a file with weights ends early")
            done += moved

    def read(self) -> int:
        """Reads it, and returns the CRC-32 of its bytes. Raises OSError."""
        checksum = 0
        for piece in self.cut(_CHECKED_PIECE):
            piece.move(os.preadv)
            checksum = zlib.crc32(piece.memory, checksum)
        return checksum

    @property
    def memory(self) -> memoryview:
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


def move(call: Callable[[int, list[memoryview], int], int], pieces: Iterable[FilePiece]) -> None:
    """Reads or writes pieces, with one thread per core. call: os.preadv or os.pwritev. Raises OSError."""
    with ThreadPoolExecutor(usable_cores()) as threads:
        for _ in threads.map(lambda part: part.move(call), [part for piece in pieces for part in piece.cut()]):
            pass


_places = WeakTensorKeyDictionary()


class _UnreadCopies:
    """Copies of the weights in a mapped file, side by side in huge pages. `read` fills them."""

    def __init__(self, path: Path, file: int, checksums: Checksums) -> None:
        """file: the descriptor of the file. Raises OSError."""
        self._path, self._file, self._state = path, file, FileState.of(file)
        self._checksums = checksums
        # Unused pages take no memory.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._memory = mmap.mmap(-1, max(1, self._state.size), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0
        self._originals: list[tuple[Tensor, Tensor]] = []  # copies, each with the weight in the mapped file
        self._unread: list[tuple[Tensor, Tensor]] = []  # those without contents

    def add(self, weight: Tensor) -> Tensor:
        """Returns the copy of a weight. If it is large, it has no contents yet."""
        if weight.nbytes < LEAST or self._used + weight.nbytes > len(self._memory):
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
        """Reads and checks the contents, and notes the places in the file, if they are known. Raises OSError."""
        try:
            memory, name = Mappings.now(), os.readlink(f"/proc/self/fd/{self._file}")
        except OSError:  # not Linux
            memory, name = Mappings(()), ""
        for copy, weight in self._originals:
            if (offset := memory.offset_in(name, weight.data_ptr(), weight.nbytes)) is not None:
                _places[copy] = StoredPlace(self._path, self._state, offset)
        pieces = []
        for copy, weight in self._unread:
            place = place_of(copy)
            if place is not None and self._checksums.has(place.offset, copy.nbytes):
                pieces.append(FilePiece(copy.data_ptr(), copy.nbytes, self._file, place.offset))
            else:
                copy.copy_(weight)
        pieces.sort(key=lambda piece: piece.size, reverse=True)  # so that threads end at the same time
        with ThreadPoolExecutor(usable_cores()) as threads:
            for piece, checksum in zip(pieces, threads.map(FilePiece.read, pieces), strict=True):
                self._checksums.compare(piece.offset, checksum)


_copies: ContextVar[_UnreadCopies | None] = ContextVar("copies", default=None)


def copy_of_stored(weight: Tensor) -> Tensor:
    """Returns a copy of a packed weight in huge pages; the original may be in a mapped file, in small pages.

    While a file is read (`copied_from`) the copy has its contents only at the end.
    """
    if (copies := _copies.get()) is not None:
        return copies.add(weight)
    copy: Tensor = torch.ops.oatmill.linear_copy(weight)
    return copy


@contextmanager
def copied_from(path: Path, file: int, checksums: Checksums) -> Iterator[None]:
    """Fills, at the end of the block, the copies that it has made of weights in a mapped file, and notes their places.

    Several threads read, since the first use of memory takes longer than copying. file: the descriptor. checksums:
    those of the file's parts, which are checked as they are read. Raises OSError.
    """
    copies = _UnreadCopies(path, file, checksums)
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
