"""Pages of memory straight from the system, and copies from host to device."""

import contextlib
import ctypes
import math
import mmap
import sys
import time
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Lock, Thread

import torch
from torch import Tensor

HOST = torch.device("cpu")  # of tensors in this process's own memory
# Deferred bytes that are worth a call to return them to the system: a share of all so far, between these bounds.
_LEAST_DEFERRED, _MOST_DEFERRED, _DEFERRED_SHARE = 32 << 20, 256 << 20, 1 / 32
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h


def use_device(device: torch.device) -> None:
    """Makes `device` the current GPU of this thread, before the thread calls CUDA for the first time; no-op on a CPU.

    The current GPU of a new thread is number 0, where the first call would open a context of several hundred MB.
    """
    if device != HOST:
        torch.cuda.set_device(device)


def to_device(values: Sequence[int] | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns `values` as a tensor `[len(values)]` on `device`. The host does not wait for the copy."""
    return copy_to_device(torch.tensor(values, dtype=dtype), device)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from the host to `device`; on a CPU it returns the same one.

    From pageable memory CUDA copies synchronously; from pinned memory the copy joins the stream.
    """
    if device == HOST:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def malloc_trim() -> None:
    """Returns freed memory to the system; the C library would keep it for later allocations."""
    if trim := getattr(_LIBC, "malloc_trim", None):  # of glibc
        trim(0)


@contextlib.contextmanager
def low_mmap_threshold() -> Iterator[None]:
    """Gives each tensor of a MiB or more, allocated in the block, pages of its own, which are unmapped with it.

    The C library (glibc) would place them among smaller ones, which leaves hundreds of MB of gaps while weights are
    packed. After the block it does so again: the tensors of forward passes have few sizes, so gaps are reused.
    """
    set_option = getattr(_LIBC, "mallopt", lambda *_: None)
    set_option(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, 32 << 20)  # the largest it would come to by itself
        set_option(_TRIM_THRESHOLD, 256 << 20)


def give_back(address: int, size: int) -> None:
    """Returns the whole pages in a range to the system. They read as zeros, or as the contents of their file, then."""
    start, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def resident_bytes() -> int:
    """Returns the bytes of this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def forget_pages(tensors: Iterable[Tensor]) -> None:
    """Returns the pages of tensors in mapped files to the system. The tensors must not have been changed.

    Otherwise these pages would count as this process's memory as long as the file is mapped. A tensor that is used
    again is read from the file again; a tensor in no file keeps its memory.
    """
    files = _mapped_files()
    for tensor in tensors:
        _forget_pages(tensor, files)


class DeferredFree:
    """Tensors that are not needed any more, whose memory is returned to the system many at a time.

    Each return takes milliseconds, more if the process holds more memory, and a model may have tens of thousands of
    tensors.
    """

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._bytes, self._total = 0, 0

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Adds tensors of a file, or with memory of their own. Those on a GPU are ignored."""
        for tensor in tensors:
            if tensor.device == HOST:
                self._tensors.append(tensor)
                self._bytes += tensor.nbytes
                self._total += tensor.nbytes
        if self._bytes >= min(max(_LEAST_DEFERRED, self._total * _DEFERRED_SHARE), _MOST_DEFERRED):
            self.free()

    def free(self) -> None:
        """Returns the memory of all of them now."""
        tensors, self._tensors, self._bytes = self._tensors, [], 0
        forget_pages(tensors)
        tensors.clear()
        malloc_trim()


def read_once(tensor: Tensor, rows: int) -> Iterator[Tensor]:
    """Yields a tensor in pieces of `rows` rows. Before the next piece it forgets the pages of a file with the last."""
    files = _mapped_files()
    for part in tensor.split(rows):
        yield part
        _forget_pages(part, files)


def _forget_pages(tensor: Tensor, files: Sequence[tuple[int, int]]) -> None:
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    place = bisect(files, (start, sys.maxsize)) - 1
    if place >= 0 and end <= files[place][1]:
        give_back(tensor.data_ptr(), tensor.nbytes)


def forget_file(path: Path) -> None:
    """Returns the pages of a mapped file to the system; tensors that are used again are read from the file again."""
    for first, last in _mapped_files(str(path)):
        give_back(first, last - first)


def _mapped_files(path: str = "") -> list[tuple[int, int]]:
    """Returns the ranges of this process's memory into which files are mapped, as (start, end) in ascending order.

    path: the file whose ranges are returned; empty: those of all files.
    """
    ranges = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/" in line and line.endswith(path):
                first, last = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
                ranges.append((first, last))
    return ranges


def mapped(shape: tuple[int, ...], dtype: torch.dtype, *, large_pages: bool = False) -> Tensor:
    """Returns zeros in pages of their own, which are allocated when they are written, and freed with the tensor.

    large_pages: use the system's largest pages, for a tensor that is read in small pieces at scattered places.
    """
    if not math.prod(shape):
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


class PageReserve:
    """Allocates the pages of mapped memory before they are written, 2 MiB of each tensor in turn.

    Allocating a page can take longer than writing it, above all in a virtual machine, whose host may lack free pages.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        most = max((tensor.nbytes for tensor in tensors), default=0)
        self._pieces = [(first, tensor) for first in range(0, most, _PIECE_BYTES) for tensor in tensors]
        self._next = 0
        self._ahead = 0  # bytes of each tensor
        self._works_ahead = False
        self._lock = Lock()

    def restart(self) -> None:
        """Notes that all pages have been returned to the system."""
        with self._lock:
            self._next, self._ahead = 0, 0

    def take(self, limit: int, seconds: float = math.inf) -> None:
        """Allocates the first `limit` bytes of each tensor, or as many as it can in `seconds`.

        It uses as many threads as torch has, since each of them waits for the host on its own. Each thread allocates at
        least one piece, which is 2 MiB of a tensor.
        """
        if self._is_taken(limit):
            return
        deadline = time.monotonic() + seconds

        def work() -> None:
            while self._take_piece(limit) and time.monotonic() < deadline:
                pass

        helpers = [Thread(target=work) for _ in range(torch.get_num_threads() - 1)]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()

    def take_ahead(self, limit: int) -> None:
        """Allocates the first `limit` bytes of each tensor in a background thread."""
        with self._lock:
            self._ahead = limit
            if self._works_ahead or self._is_taken(limit):
                return
            self._works_ahead = True
        Thread(target=self._work_ahead, name="pages", daemon=True).start()

    def _work_ahead(self) -> None:
        while self._works_ahead:
            started = time.monotonic()
            if not self._take_piece(self._ahead):
                with self._lock:
                    self._works_ahead = not self._is_taken(self._ahead)
            time.sleep(_RESTS * (time.monotonic() - started))

    def _is_taken(self, limit: int) -> bool:
        return self._next == len(self._pieces) or self._pieces[self._next][0] >= limit

    def _take_piece(self, limit: int) -> bool:
        """Allocates the next piece. Returns False if none was left."""
        with self._lock:
            if self._is_taken(limit):
                return False
            first, tensor = self._pieces[self._next]
            self._next += 1
        length = min(_PIECE_BYTES, tensor.nbytes - first)
        if length > 0 and not _take_pages(tensor.data_ptr() + first, length):
            with self._lock:
                self._next = len(self._pieces)
        return True


_PIECE_BYTES = 2 << 20
# Pause between two pieces in the background, as a multiple of the time for a piece. A step waits for the slowest of its
# threads, and the background thread slows down the one with which it shares a core.
_RESTS = 4
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def _take_pages(address: int, length: int) -> bool:
    """Allocates the pages at an address. Returns False if the system has no call for that."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    result: int = _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(address + length - start), _MADV_POPULATE_WRITE)
    return result == 0


_LIBC = ctypes.CDLL(None)
