"""All-reduce of small tensors through torch's symmetric memory, which all GPUs of a machine can read.

For the few KB of a decode step NCCL's latency dominates. Tensors of up to MOST_BYTES use symmetric memory, if a test at
start-up finds that it computes what NCCL computes, unless `--cuda-all-reduce nccl` is given.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from tgi_server.engine import proofs

# Up to this many bytes every GPU reads all of every other GPU's tensor (one-shot). Above it, each GPU sums a part, and
# the others read the sums (two-shot). Above MOST_BYTES, NCCL is as fast.
ONE_SHOT_BYTES = 256 << 10
MOST_BYTES = 4 << 20
# The dtypes that the operators support, and their alignment in bytes.
_DTYPES = (torch.float32, torch.bfloat16)
_UNIT = 16


class SymmetricMemory:
    """A buffer on each GPU into which its shard copies a tensor, so that the others can read and sum it."""

    def __init__(self, device: torch.device) -> None:
        """All shards create it together. Raises RuntimeError if GPUs cannot read each other's memory."""
        import torch.distributed._symmetric_memory as symmetric

        self._group: str = dist.distributed_c10d._get_default_group().group_name
        self._buffer = symmetric.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._buffer, self._group)

    def takes(self, tensor: Tensor) -> bool:
        """Returns True if the tensor's dtype, size and alignment are supported."""
        return tensor.dtype in _DTYPES and 0 < tensor.nbytes <= MOST_BYTES and tensor.nbytes % _UNIT == 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums every shard's tensor, in place. tensor: contiguous, of one shape in all shards."""
        flat, own = tensor.view(-1), self._buffer[: tensor.nbytes].view(tensor.dtype)
        if tensor.nbytes <= ONE_SHOT_BYTES:  # one kernel copies and sums
            torch.ops.symm_mem.one_shot_all_reduce_copy_out(own, flat, "sum", self._group, flat)
            return
        own.copy_(flat)
        torch.ops.symm_mem.two_shot_all_reduce_(own, "sum", self._group)
        flat.copy_(own)


def access_fault(device: torch.device) -> str | None:
    """Returns which GPU this GPU cannot read the memory of, as a message; None if it can read all of them."""
    if device.type != "cuda":
        return None
    for other in range(torch.cuda.device_count()):
        if other != device.index and not torch.cuda.can_device_access_peer(device, other):
            return f"GPU {device.index} cannot read the memory of GPU {other}"
    return None


def fault_of(memory: SymmetricMemory, rank: int, device: torch.device) -> str | None:
    """Compares sums through symmetric memory with NCCL's. Returns the fault, or None. All shards call it together."""
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
