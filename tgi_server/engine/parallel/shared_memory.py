"""Memory that the shards of one machine share, for all-reduces and all-gathers of small tensors in microseconds.

`kernels/cpu/runtime/ranks.h` describes the protocol.
"""

import logging
import mmap
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tgi_server.engine.kernels import load_kernels

logger = logging.getLogger(__name__)

FOLDER = Path("/dev/shm")  # noqa: S108
# Size of a buffer in which a shard offers a tensor to the others; larger tensors are sent in parts.
PLACE_BYTES = 4 << 20
# Shared memory of each shard: two buffers, and a counter on a cache line of its own.
SHARD_BYTES = 2 * PLACE_BYTES + 64


def share_memory(rank: int, world_size: int, exchange: Callable[[str], list[str]], timeout: float) -> Any:
    """Returns a `torch.classes.oatmill.Ranks` over memory that all shards share. All shards call this together.

    Logs a line and returns None if a shard has no kernels or cannot map the memory, for example on another machine.

    exchange: `ShardGroup.exchange`. timeout: seconds that a shard waits for the others in a collective.
    """
    own = _create(world_size * SHARD_BYTES) if rank == 0 and load_kernels() else None
    path = Path(exchange(str(own or ""))[0])
    file = _open(path) if path.name and load_kernels() else None
    processes = exchange(str(os.getpid() if file is not None else 0))
    if own is not None:
        own.unlink()
    if "0" in processes or file is None:
        logger.info("the shards share no memory, so that every step takes longer")
        return None
    memory = torch.frombuffer(mmap.mmap(file, world_size * SHARD_BYTES), dtype=torch.uint8)
    os.close(file)
    return torch.classes.oatmill.Ranks(memory, rank, [int(process) for process in processes], PLACE_BYTES, timeout)


def _create(size: int) -> Path | None:
    """Creates a file of zeros and allocates all its memory now: running out of it later would kill the process.

    size: bytes. Returns None if the memory cannot be allocated.
    """
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
