"""How much memory the KV cache may take, and memory that comes straight from the system."""

import contextlib
import math
import mmap
from pathlib import Path

import psutil
import torch
from torch import Tensor

CPU_SHARE = 0.3
"""Of the RAM that is free after loading. The rest is left to activations and to whatever else runs there."""


def cache_bytes(device: torch.device, memory_fraction: float, cpu_memory: int | None, processes: int = 1) -> int:
    """Bytes for keys and values on `device`, once the weights are loaded and the largest pass has run.

    processes: how many share the RAM, and what is given of it.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        reusable = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
        return max(0, int(free + reusable - (1 - memory_fraction) * total))
    if cpu_memory is not None:
        return cpu_memory // processes
    return int(CPU_SHARE * available_ram()) // processes


def available_ram() -> int:
    """Bytes of RAM that this process may still take: of the machine, or of its control group if that has less."""
    available = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    try:
        return min(available, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):
        return available


def mapped(shape: tuple[int, ...], dtype: torch.dtype, *, large_pages: bool = False) -> Tensor:
    """Zeros in pages of their own, which are taken when they are written, and go back to the system with the tensor.

    large_pages: as large as the system has, for what is read a little here and a little there.
    """
    memory = mmap.mmap(-1, max(1, math.prod(shape) * dtype.itemsize), flags=mmap.MAP_PRIVATE)
    if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
