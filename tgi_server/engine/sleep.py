"""A sleeping model: its weights lie in a file and its KV cache is empty, so that the process holds little memory.

Weights keep their addresses. The pages below them are returned to the system when the model falls asleep, and filled
from the file when it wakes, so nothing that points to them has to change, and every bit is the same. The file has no
name: nobody else can change or delete it, and it goes with the process, however that ends.
"""

import ctypes
import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, UntypedStorage

from shared.control_groups import usable_cores
from tgi_server.engine.backends.attention.base import AttentionBackend
from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.encoders import Encoder
from tgi_server.engine.engine import Engine
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.lora.loaded import LoadedAdapters
from tgi_server.engine.memory import HOST, give_back, malloc_trim, resident_bytes
from tgi_server.engine.memory_map import Mappings
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.runners.paged_batch import PagedBatch

# Bytes of the least weight that is worth a place in the file, and of what a thread reads or writes at once.
_LEAST, _PIECE = 256 << 10, 8 << 20
# Bytes between two weights side by side in huge pages.
_GAP = 64
_NOT_WEIGHTS = (
    *(str, bytes, int, float, type, ModuleType, BuiltinFunctionType),
    *(LoadedAdapters, PagedBatch),
)


@dataclass(frozen=True, slots=True)
class _Range:
    """Bytes of this process's memory, from an address on. offset: of their copy in the file."""

    address: int
    size: int
    offset: int

    def pieces(self) -> Iterator["_Range"]:
        for start in range(0, self.size, _PIECE):
            yield _Range(self.address + start, min(_PIECE, self.size - start), self.offset + start)

    @property
    def memory(self) -> memoryview:
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


@dataclass(slots=True)
class _Copy:
    """The file, and what it has a copy of. weights: keeps these where they are; their contents never change."""

    file: int
    ranges: list[_Range] = field(default_factory=list)
    weights: list[UntypedStorage] = field(default_factory=list)

    def move(self, transfer: Callable[[_Range], None]) -> None:
        """Calls `transfer` with all pieces of the ranges, in as many threads as there are cores."""
        with ThreadPoolExecutor(usable_cores()) as threads:
            for _ in threads.map(transfer, [piece for each in self.ranges for piece in each.pieces()]):
                pass


class SleepingModel:
    """Puts the models of a process to sleep, and wakes them. Nothing may compute with them meanwhile.

    asleep: they sleep now.
    """

    def __init__(self, engine: Engine | None, encoders: Iterable[Encoder], folder: Path | None) -> None:
        """folder: where the file is written; None: the models cannot sleep."""
        self.asleep = False
        self._engine = engine
        self._encoders = list(encoders)
        self._folder = folder
        self._copy: _Copy | None = None
        self._capacity: CacheCapacity | None = None

    def sleep(self) -> int:
        """Returns the bytes of memory that the process holds less. Does nothing if the models sleep already.

        Raises InvalidCall for models that cannot sleep, with the reason, and while sequences run.
        """
        if self.asleep:
            return 0
        before = resident_bytes()
        engine = self._engine
        if engine is not None:
            if engine.info.device_type != HOST.type:
                raise InvalidCall(f"a model on a device of the kind {engine.info.device_type} cannot sleep")
            if engine.batch is not None:
                raise InvalidCall("the model cannot sleep while sequences run")
            capacity = engine.capacity
            engine.clear()
            if engine.tower is not None:
                engine.tower.clear()
        found, memory = _Found.below(self._roots()), Mappings.now()
        if self._copy is None:
            self._copy = self._write(list(found.weights.values()), memory)
        if engine is not None:
            self._capacity, engine._capacity = capacity, None  # so no step can be started
        self.asleep = True
        for attention in found.attentions:
            attention.forget_blocks()
        for states in found.states:
            states.forget()
        for part in self._copy.ranges:
            give_back(part.address, part.size)
        for storage in found.weights.values():
            if memory.is_unchanged_file(storage.data_ptr(), storage.nbytes()):
                give_back(storage.data_ptr(), storage.nbytes())
        malloc_trim()
        return max(0, before - resident_bytes())

    def wake(self) -> None:
        """Reads the weights back. Does nothing for models that are awake. Raises OSError: they are lost then."""
        if not self.asleep:
            return
        assert self._copy is not None
        self._copy.move(partial(_read, self._copy.file))
        if self._engine is not None:
            self._engine._capacity = self._capacity
        self.asleep = False

    def _roots(self) -> list[Any]:
        engine = self._engine
        return [*self._encoders, *(() if engine is None else (engine._runner, engine.speculation, engine.tower))]

    def _write(self, weights: Sequence[UntypedStorage], memory: Mappings) -> _Copy:
        """Writes the weights that lie in no file. Raises InvalidCall."""
        if self._folder is None:
            raise InvalidCall("the model cannot sleep: --packed-weights-cache is none, so its weights have no place")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy = _Copy(_nameless_file(self._folder), _ranges(weights, memory), list(weights))
            try:
                os.posix_fallocate(copy.file, 0, max(1, sum(each.size for each in copy.ranges)))
                copy.move(partial(_put, copy.file))
            except BaseException:
                os.close(copy.file)
                raise
        except OSError as error:
            raise InvalidCall(f"the model cannot sleep: {self._folder} cannot take its weights: {error}") from error
        return copy


@dataclass(slots=True)
class _Found:
    """The memory of models. weights: by address."""

    weights: dict[int, UntypedStorage] = field(default_factory=dict)
    attentions: list[AttentionBackend] = field(default_factory=list)
    states: list[SequenceStates] = field(default_factory=list)

    @classmethod
    def below(cls, roots: Iterable[object]) -> "_Found":
        """Returns all that objects, and those that they refer to, have."""
        found, seen, stack = cls(), set[int](), list(roots)
        while stack:
            value = stack.pop()
            if id(value) in seen or isinstance(value, _NOT_WEIGHTS):
                continue
            seen.add(id(value))
            if isinstance(value, AttentionBackend):
                found.attentions.append(value)
            elif isinstance(value, SequenceStates):
                found.states.append(value)
            elif isinstance(value, FunctionType):  # whose module leads everywhere
                stack.extend(value.__closure__ or ())
            else:
                if isinstance(value, Tensor) and value.device == HOST:
                    storage = value.untyped_storage()
                    if storage.nbytes() >= _LEAST:
                        found.weights[storage.data_ptr()] = storage
                stack.extend(gc.get_referents(value))
        return found


def _ranges(weights: Iterable[UntypedStorage], memory: Mappings) -> list[_Range]:
    """Returns the whole pages of the weights that lie in no file."""
    ranges: list[tuple[int, int]] = []
    for address, size in sorted((each.data_ptr(), each.nbytes()) for each in weights):
        if (mapping := memory.anonymous(address, size)) is None:
            continue
        gap = _GAP if mapping.huge_pages else 0  # an arena of weights; elsewhere something else may lie between
        if ranges and address <= ranges[-1][1] + gap:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], address + size)
        else:
            ranges.append((address, address + size))
    whole, offset = [], 0
    for first, last in ranges:
        first, last = -(-first // PAGESIZE) * PAGESIZE, last // PAGESIZE * PAGESIZE
        if first < last:
            whole.append(_Range(first, last - first, offset))
            offset += last - first
    return whole


def _nameless_file(folder: Path) -> int:
    """Returns the descriptor of a new file that has no name. Raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # a file system that cannot
        file, path = tempfile.mkstemp(dir=folder, suffix=".unfinished", prefix="")
        os.unlink(path)
        return file


def _put(file: int, part: _Range) -> None:
    _transfer(os.pwritev, file, part)


def _read(file: int, part: _Range) -> None:
    _transfer(os.preadv, file, part)


def _transfer(call: Callable[[int, list[memoryview], int], int], file: int, part: _Range) -> None:
    """Reads or writes all of a range. Raises OSError."""
    memory, done = part.memory, 0
    while done < part.size:
        moved = call(file, [memory[done:]], part.offset + done)
        if not moved:
            raise OSError("the file with the weights of the sleeping model ends early")
        done += moved
