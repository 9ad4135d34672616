"""All-reduce of small tensors among the GPUs of a machine, by memory that all of them read: symmetric memory of torch.

Messages of NCCL take longer than the few KB of a decode step are worth. This is used for tensors up to a size, once it
has been found to compute what NCCL does, unless `--cuda-all-reduce nccl` is given.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from tgi_server.engine import proofs

# Up to this many bytes every GPU reads all of every other's tensor; beyond that each sums up a part, which the others
# read. From the largest size on NCCL is as fast.
ONE_SHOT_BYTES = 256 << 10
MOST_BYTES = 4 << 20
# What the operators compute in, and the alignment that they need.
_DTYPES = (torch.float32, torch.bfloat16)
_UNIT = 16


class SymmetricMemory:
    """A buffer on each GPU, at which every shard puts its tensor before all are summed."""

    def __init__(self, device: torch.device) -> None:
        """All shards do this together. Raises RuntimeError where GPUs cannot read each other's memory."""
        import torch.distributed._symmetric_memory as symmetric

        self._group: str = dist.distributed_c10d._get_default_group().group_name
        self._buffer = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, self._group)

    def takes(self, tensor: Tensor) -> bool:
        return tensor.dtype in _DTYPES and 0 < tensor.nbytes <= MOST_BYTES and tensor.nbytes % _UNIT == 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums every shard's tensor, contiguous, into `tensor`."""
        flat, own = tensor.view(-1), self._buffer[: tensor.nbytes].view(tensor.dtype)
        if tensor.nbytes <= ONE_SHOT_BYTES:  # one kernel copies and sums
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(own, flat, "sum", self._group, flat)
            return
        own.copy_(flat)
        torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", self._group)
        flat.copy_(own)


def access_fault(device: torch.device) -> str | None:
    """Returns why GPUs cannot sum through memory that all of them read: some cannot read others'. None if they can."""
    if device.type != "cuda":
        return None
    for other in range(torch.cuda.device_count()):
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"GPU {device.index} cannot read the memory of GPU {other}"
    return None


def fault_of(memory: SymmetricMemory, rank: int, device: torch.device) -> str | None:
    """Sums tensors of several sizes, and again by NCCL. Returns why the memory must not be used; None if it is right.

    All shards do this together.
    """
    generator = torch.Generator(device).manual_seed(rank)

    def cases() -> Iterator[proofs.Case]:
        for dtype in _DTYPES:
            for size in (_UNIT, ONE_SHOT_BYTES, ONE_SHOT_BYTES + _UNIT, MOST_BYTES):
                tensor = torch.randn(size // dtype.itemsize, generator=generator, device=device).to(dtype)
                wanted = tensor.clone()
                dist.all_reduce(wanted)
                memory.all_reduce(tensor)
                yield f"in sums of {size} bytes", tensor, wanted

    return proofs.fault_of("symmetric memory", cases)
