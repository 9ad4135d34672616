"""Sleep of a model: its weights are in files, its KV cache is empty, and the process holds little memory.

Weights keep their addresses, so pointers to them stay valid: their pages are returned to the system when the model
falls asleep, and filled from files, with the same bits, when it wakes. Packed weights that were loaded from a file are
read from that file again. All others are written to an unnamed file (O_TMPFILE), which no other process can change, and
which the system deletes when the process ends.
"""

import gc
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from mmap import PAGESIZE
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, UntypedStorage

from tgi_server.engine.backends.attention.base import AttentionBackend
from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.checkpoint.stored_weights import FilePiece, FileState, StoredPlace, move, place_of
from tgi_server.engine.encoders import Encoder
from tgi_server.engine.engine import Engine
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.lora.loaded import LoadedAdapters
from tgi_server.engine.memory import HOST, give_back, malloc_trim, resident_bytes
from tgi_server.engine.memory_map import Mappings
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.runners.paged_batch import PagedBatch

# Bytes of the smallest weight that is written to a file.
_LEAST = 256 << 10
# Maximum gap in bytes between two adjacent weights in huge pages.
_GAP = 64
_NOT_WEIGHTS = (
    *(str, bytes, int, float, type, ModuleType, BuiltinFunctionType),
    *(LoadedAdapters, PagedBatch),
)


@dataclass(frozen=True, slots=True)
class _Weight:
    """The memory of a weight, which it keeps, and its place in a file. place: None if it is in no known file."""

    storage: UntypedStorage
    place: StoredPlace | None

    @property
    def first(self) -> int:
        return self.storage.data_ptr()

    @property
    def last(self) -> int:
        return self.first + self.storage.nbytes()


class _Copies:
    """Copies of the weights in files: packed weights of later starts, and an unnamed file with all others.

    pages: address and size of the memory that can be freed. The weights must not move or change while this exists.
    """

    def __init__(self, weights: Iterable[_Weight], memory: Mappings, folder: Path) -> None:
        """Writes the weights that are in no file to a new one in the folder. Raises OSError."""
        self._weights = sorted(weights, key=lambda weight: weight.first)
        self._files: dict[Path, int] = {}
        self._states: dict[Path, FileState] = {}
        self.pages: list[tuple[int, int]] = []
        self._pieces: list[FilePiece] = []
        own: list[FilePiece] = []
        self._own = _nameless_file(folder)
        try:
            for group in _side_by_side(self._weights, memory):
                self._add_pages(group, own)
            os.posix_fallocate(self._own, 0, max(1, sum(piece.size for piece in own)))
            move(os.pwritev, own)
        except BaseException:
            self.close()
            raise
        self._pieces += own
        for weight in self._weights:
            if (path := memory.unchanged_file(weight.first, weight.last - weight.first)) is not None:
                self.pages.append((weight.first, weight.last - weight.first))
                with suppress(FileNotFoundError):  # it was deleted, but is mapped
                    self._states[path] = FileState.of(path)

    def read(self) -> None:
        """Reads all weights back. Raises OSError, also for a file that has been changed."""
        if (path := self.changed_file()) is not None:
            raise OSError(f"{path} was changed while the model slept")
        move(os.preadv, self._pieces)

    def changed_file(self) -> Path | None:
        """Returns a file that has been changed; None if there is none. Deleted files are still open here, or mapped."""
        for path, state in self._states.items():
            with suppress(FileNotFoundError):
                now = FileState.of(path)
                if (now.device, now.number) == (state.device, state.number) and now != state:
                    return path
        return None

    def close(self) -> None:
        for file in (self._own, *self._files.values()):
            os.close(file)

    def _add_pages(self, group: Sequence[_Weight], own: list[FilePiece]) -> None:
        """Adds the whole pages of adjacent weights. own: pieces of the unnamed file."""
        first, last = -(-group[0].first // PAGESIZE) * PAGESIZE, max(each.last for each in group) // PAGESIZE * PAGESIZE
        if first >= last:
            return
        self.pages.append((first, last - first))
        for weight in group:
            start, end = max(first, weight.first), min(last, weight.last)
            if start >= end:
                continue
            if (file := self._open(weight.place)) is not None and weight.place is not None:
                offset = weight.place.offset + start - weight.first
                self._pieces.append(FilePiece(start, end - start, file, offset))
            else:
                offset = own[-1].offset + own[-1].size if own else 0
                own.append(FilePiece(start, end - start, self._own, offset))

    def _open(self, place: StoredPlace | None) -> int | None:
        """Returns a descriptor of the file; None if it has been replaced or changed."""
        if place is None:
            return None
        if place.path not in self._files:
            try:
                file = os.open(place.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                return None
            if FileState.of(file) != place.state:
                os.close(file)
                return None
            self._files[place.path], self._states[place.path] = file, place.state
        return self._files[place.path]


class SleepingModel:
    """Puts the models of a process to sleep, and wakes them. They must not be used concurrently.

    asleep: True while they sleep.
    """

    def __init__(self, engine: Engine | None, encoders: Iterable[Encoder], folder: Path | None) -> None:
        """folder: folder of the unnamed file; None: the models cannot sleep."""
        self.asleep = False
        self._engine = engine
        self._encoders = list(encoders)
        self._folder = folder
        self._copies: _Copies | None = None
        self._capacity: CacheCapacity | None = None

    def sleep(self) -> int:
        """Puts the models to sleep, if they are awake. Returns the bytes of memory that were freed.

        Raises InvalidCall, with the reason, if the models cannot sleep, or if sequences are running.
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
        if self._copies is not None and self._copies.changed_file() is not None:
            self._copies.close()
            self._copies = None
        if self._copies is None:
            self._copies = self._write(found.weights.values(), memory)
        if engine is not None:
            self._capacity, engine._capacity = capacity, None  # so no step can be started
        self.asleep = True
        for attention in found.attentions:
            attention.forget_blocks()
        for states in found.states:
            states.forget()
        for address, size in self._copies.pages:
            give_back(address, size)
        malloc_trim()
        return max(0, before - resident_bytes())

    def wake(self) -> None:
        """Reads the weights back, if the models sleep. Raises OSError; the weights are lost then."""
        if not self.asleep:
            return
        assert self._copies is not None
        self._copies.read()
        if self._engine is not None:
            self._engine._capacity = self._capacity
        self.asleep = False

    def _roots(self) -> list[Any]:
        engine = self._engine
        return [*self._encoders, *(() if engine is None else (engine._runner, engine.speculation, engine.tower))]

    def _write(self, weights: Iterable[_Weight], memory: Mappings) -> _Copies:
        """Writes the weights that are in no file. Raises InvalidCall."""
        if self._folder is None:
            raise InvalidCall("the model cannot sleep: --packed-weights-cache is none, so its weights cannot be stored")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return _Copies(weights, memory, self._folder)
        except OSError as error:
            raise InvalidCall(f"the model cannot sleep: {self._folder} cannot take its weights: {error}") from error


@dataclass(slots=True)
class _Found:
    """Weights and caches of models. weights: by address."""

    weights: dict[int, _Weight] = field(default_factory=dict)
    attentions: list[AttentionBackend] = field(default_factory=list)
    states: list[SequenceStates] = field(default_factory=list)

    @classmethod
    def below(cls, roots: Iterable[object]) -> "_Found":
        """Returns the weights and caches that are reachable from the roots."""
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
            elif isinstance(value, FunctionType):  # its module would reach all modules
                stack.extend(value.__closure__ or ())
            else:
                if isinstance(value, Tensor) and value.device == HOST:
                    storage = value.untyped_storage()
                    if storage.nbytes() >= _LEAST:
                        found.add(storage, place_of(value))
                stack.extend(gc.get_referents(value))
        return found

    def add(self, storage: UntypedStorage, place: StoredPlace | None) -> None:
        """Adds a weight. At each address the largest one is kept; of equal ones, one with a known place."""
        known = self.weights.get(storage.data_ptr())
        if known is None or (known.storage.nbytes(), known.place is not None) < (storage.nbytes(), place is not None):
            self.weights[storage.data_ptr()] = _Weight(storage, place)


def _side_by_side(weights: Iterable[_Weight], memory: Mappings) -> Iterator[list[_Weight]]:
    """Yields groups of adjacent weights in anonymous memory, whose pages have no other contents. weights: sorted."""
    group: list[_Weight] = []
    for weight in weights:
        mapping = memory.anonymous(weight.first, weight.last - weight.first)
        if mapping is None:
            continue
        gap = _GAP if mapping.huge_pages else 0  # an arena has weights only; elsewhere a gap may have other contents
        if group and weight.first > max(each.last for each in group[-2:]) + gap:
            yield group
            group = []
        group.append(weight)
    if group:
        yield group


def _nameless_file(folder: Path) -> int:
    """Returns the descriptor of a new unnamed file. Raises OSError."""
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # the file system has no O_TMPFILE
        file, path = tempfile.mkstemp(dir=folder, suffix=".unfinished", prefix="")
        os.unlink(path)
        return file
