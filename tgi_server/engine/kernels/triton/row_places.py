"""Slots and lengths of the rows that decode, in one Triton kernel instead of about eight kernels of torch."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier

_AT_ONCE = 128


def row_places(positions: Tensor, tables: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """Returns what `AttentionBackend.row_places` does."""
    rows, device = len(positions), positions.device
    slots = torch.empty(rows, dtype=torch.int64, device=device)
    kv_lengths = torch.empty(rows, dtype=torch.int32, device=device)
    _row_places[triton.cdiv(rows, _AT_ONCE),](
        positions, tables, slots, kv_lengths, rows, tables.stride(0), block_size=block_size, at_once=_AT_ONCE,
        **launch_options(device),
    )  # fmt: skip
    return slots, kv_lengths


@triton.jit(do_not_specialize=["rows", "table_stride"])
def _row_places(
    positions, tables, slots, kv_lengths, rows, table_stride,
    block_size: tl.constexpr, at_once: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    if pdl:
        wait_for_earlier()
    row = tl.program_id(0) * at_once + tl.arange(0, at_once)
    real = row < rows
    position = tl.load(positions + row, mask=real, other=0)
    block = tl.load(tables + row.to(tl.int64) * table_stride + position // block_size, mask=real, other=0)
    tl.store(slots + row, block.to(tl.int64) * block_size + position % block_size, mask=real)
    tl.store(kv_lengths + row, (position + 1).to(tl.int32), mask=real)
