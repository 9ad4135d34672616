"""The engine's GPU kernels. The modules of this folder import Triton; this one, which their callers need, does not."""

import os
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.memory import HOST

# Compute capability of the oldest GPUs that the kernels with matrix products are for. Older ones have no bfloat16, and
# Triton compiles products for them without tensor cores.
OLDEST_DEVICE = (8, 0)

# Variants that have not been measured on a GPU yet, so they are off unless the variable names them, separated by
# commas: products with few rows fused with the norm before and the activation after them; attention of rows that
# decode in one kernel; kernels that are started while the one before still runs (`dependent_launch.py`); the argmax of
# a row on many processors; cosines and sines of rotary positions in one kernel; the products of experts by the engine's
# kernel also where torch has one.
VARIANTS_VARIABLE, VARIANTS = (
    "OATMILL_GPU_VARIANTS",
    ("few_rows", "attend_in_one", "pdl", "argmax", "rotary", "experts"),
)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Tokens of a pass that kernels attend for together: neighbours in one sequence. Each field is [tiles] int32.

    first: index of a tile's first token among the pass's. counts: its tokens; 0: nothing is attended.
    kv_lengths: keys that its last token sees, its own included. sequences: its row of the block tables.
    """

    first: Tensor
    counts: Tensor
    kv_lengths: Tensor
    sequences: Tensor


def device_fault(device: torch.device) -> str | None:
    """Returns the reason why the kernels with matrix products must not be used on a device; None if they may be."""
    if device == HOST or (capability := torch.cuda.get_device_capability(device)) >= OLDEST_DEVICE:
        return None
    return "the kernels need a GPU of compute capability {}.{}; this one has {}.{}".format(*OLDEST_DEVICE, *capability)


@cache
def shared_memory(device: torch.device) -> int:
    """Returns the bytes of shared memory that a program on a GPU may have; of a CPU, in tests, 227 KiB."""
    if device == HOST:
        return 227 << 10
    size: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return size


@cache
def multiprocessors(device: torch.device) -> int:
    """Returns how many multiprocessors a GPU has; of a CPU, in tests, 4."""
    return 4 if device == HOST else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def variants() -> frozenset[str]:
    """Returns the VARIANTS that are on. Raises UnsupportedModel for another name in the variable."""
    named = frozenset(filter(None, os.environ.get(VARIANTS_VARIABLE, "").split(",")))
    if unknown := named.difference(VARIANTS):
        raise UnsupportedModel(f"{VARIANTS_VARIABLE}: no {', '.join(sorted(unknown))}; there are {', '.join(VARIANTS)}")
    return named
