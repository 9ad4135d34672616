"""Small all-reduces and all-gathers between processes of one machine, in microseconds: through memory that they share.

Every shard has two places there, which it uses in turn, and a counter of the tensors that it has put down. It puts its
tensor down, counts, waits until the others have counted as far, and reads theirs. A place is written again two calls
later; by then every other shard has begun the call between, so has read what was there.

This relies on every processor seeing another's writes in their order, as x86 has it (Intel SDM, vol. 3, 9.2).
"""

import logging
import mmap
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tgi_server.engine.errors import PeerLost

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")  # noqa: S108
# Larger tensors take so long to send that another way costs little more.
PLACE_BYTES = 4 << 20
PLACES = 2
# Counters of different shards stand so far apart that a write of one does not slow down readers of the others.
LINE_BYTES = 64
# Looks at the counters without a pause. After that, another thread that needs this core gets it at every look.
SPINS = 100
# Further looks after which a shard checks that its peers are alive, and that time is not up.
LOOKS = 1000


class SharedMemory:
    """The memory of `world_size` processes, of which this is `rank`."""

    def __init__(self, file: int, rank: int, processes: list[int], timeout: float) -> None:
        """file: a descriptor. processes: the ids of all, in the order of ranks. timeout: seconds."""
        world_size = len(processes)
        self._rank = rank
        self._processes = processes
        self._timeout = timeout
        self._calls = 0
        memory = mmap.mmap(file, _size(world_size))
        counters = np.frombuffer(memory, dtype=np.int64, count=world_size * LINE_BYTES // 8)
        self._counters = counters[:: LINE_BYTES // 8]
        places = torch.frombuffer(memory, dtype=torch.uint8, offset=world_size * LINE_BYTES)
        self._places = places.view(PLACES, world_size, PLACE_BYTES)

    def fits(self, tensor: Tensor) -> bool:
        return tensor.nbytes <= PLACE_BYTES

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums a contiguous tensor over all shards, in place; the result has the same bits everywhere."""
        first, *others = self._exchange(tensor)
        torch.add(first, others[0], out=tensor)
        for other in others[1:]:
            tensor.add_(other)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Joins every shard's tensor along the last axis. tensor: contiguous."""
        return torch.cat(self._exchange(tensor), dim=-1)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        """Returns every shard's tensor. The tensors of others are theirs again from the call after the next on."""
        places = self._places[self._calls % PLACES, :, : tensor.nbytes].view(tensor.dtype)
        parts = [place.view(tensor.shape) for place in places]
        parts[self._rank].copy_(tensor)
        self._calls += 1
        self._counters[self._rank] = self._calls
        self._wait()
        return parts

    def _wait(self) -> None:
        counters, calls = self._counters, self._calls
        for _ in range(SPINS):
            if counters.min() >= calls:
                return
        deadline = time.monotonic() + self._timeout
        while True:
            for _ in range(LOOKS):
                if counters.min() >= calls:
                    return
                os.sched_yield()
            self._check_others(deadline)

    def _check_others(self, deadline: float) -> None:
        for rank, process in enumerate(self._processes):
            if not _is_alive(process):
                raise PeerLost(f"peer lost: shard {rank} has ended")
        if time.monotonic() > deadline:
            late = [rank for rank, count in enumerate(self._counters) if count < self._calls]
            raise PeerLost(f"shard {late[0]} has not come to the same point within {self._timeout:g} s")


def share_memory(
    rank: int, world_size: int, exchange: Callable[[str], list[str]], timeout: float
) -> SharedMemory | None:
    """Returns memory that all shards share; None, after a line in the log, on machines that cannot share any.

    exchange: returns every shard's message; all shards call this function together. timeout: seconds that
    `SharedMemory` waits.
    """
    own = _create(_size(world_size)) if rank == 0 and platform.machine() in ("x86_64", "AMD64") else None
    path = Path(exchange(str(own or ""))[0])
    file = _open(path) if path.name else None
    processes = exchange(str(os.getpid() if file is not None else 0))
    if own is not None:
        own.unlink()
    if "0" in processes or file is None:
        logger.info("the shards share no memory, so that every step takes longer")
        return None
    memory = SharedMemory(file, rank, [int(process) for process in processes], timeout)
    os.close(file)
    return memory


def _size(world_size: int) -> int:
    return world_size * (LINE_BYTES + PLACES * PLACE_BYTES)


def _create(size: int) -> Path | None:
    """Creates an empty file that has all its memory already: memory missing later would kill the process."""
    try:
        file, name = tempfile.mkstemp(prefix="oatmill-", dir=FOLDER)
    except OSError:
        return None
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        Path(name).unlink()
        return None
    finally:
        os.close(file)
    return Path(name)


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR)
    except OSError:
        return None


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return not _is_zombie(process)


def _is_zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False
