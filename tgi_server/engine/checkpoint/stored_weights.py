"""The places in a file of weights that were copied from there into huge pages.

A model that sleeps gives the copies up, and reads them from the same places when it wakes (`sleep.py`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from tgi_server.engine.memory_map import Mappings


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


_places = WeakTensorKeyDictionary()
# Copies that were made while a file is read, each with the address of the original in the mapped file.
_copies: ContextVar[list[tuple[Tensor, int]] | None] = ContextVar("copies", default=None)


def copy_of_stored(weight: Tensor) -> Tensor:
    """Returns a copy in huge pages of a packed weight, which may lie in a file, in small pages."""
    copy: Tensor = torch.ops.oatmill.linear_copy(weight)
    if (copies := _copies.get()) is not None:
        copies.append((copy, weight.data_ptr()))
    return copy


@contextmanager
def places_noted(path: Path, file: int) -> Iterator[None]:
    """Notes the places of all weights that the block copies from a file, which it maps. file: its descriptor."""
    copies: list[tuple[Tensor, int]] = []
    token = _copies.set(copies)
    try:
        yield
    finally:
        _copies.reset(token)
    try:
        memory, state, name = Mappings.now(), FileState.of(file), os.readlink(f"/proc/self/fd/{file}")
    except OSError:  # no Linux
        return
    for copy, address in copies:
        if (offset := memory.offset_in(name, address, copy.nbytes)) is not None:
            _places[copy] = StoredPlace(path, state, offset)


def place_of(weight: Tensor) -> StoredPlace | None:
    """Returns where the bytes of a weight are stored, if that is known."""
    place: StoredPlace | None = _places.get(weight)
    return place
