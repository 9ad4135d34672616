"""The small products of adapters on a GPU, in two Triton kernels that group the rows by adapter.

Rows are sorted by their adapter's number, and each program takes some neighbours in that order: it reads the matrices
of the adapters that occur among them, mostly one. Which matrices those are, it reads from tables on the device, so a
captured step stays right when adapters are loaded and removed.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

# Passes of more rows have programs of more rows.
FEW_ROWS = 64
_INPUTS_AT_ONCE, _RANKS_AT_ONCE, _OUTPUTS_AT_ONCE = 32, 16, 32


def add_products(
    x: Tensor,
    y: Tensor,
    numbers: Tensor,
    order: Tensor,
    tables: Tensor,
    ranks: Tensor,
    most_ranks: int,
    *,
    residual: Tensor | None,
) -> Tensor:
    """Changes y, [..., outputs], by the adapter of each row: dora_scale * y + x A^T B + bias_delta. Returns it.

    x: [..., inputs]. numbers: int32, the adapter of each row. order: int64, the rows by their adapters. tables:
    [4, adapters] int64, addresses of A, B, dora_scale and bias_delta, 0 for none. ranks: [adapters] int32. most_ranks:
    of any.
    """
    x = x.contiguous()
    inputs, outputs = x.shape[-1], y.shape[-1]
    count = x.numel() // inputs
    together = 16 if count <= FEW_ROWS else 32
    sums = x.new_empty(count, most_ranks)
    precision = "ieee" if x.dtype is torch.float32 else "tf32"
    blocks = triton.cdiv(count, together)
    _shrink[blocks, triton.cdiv(most_ranks, _RANKS_AT_ONCE)](
        x, order, numbers, tables[0], ranks, sums, count, inputs, most_ranks,
        together=together, inputs_at_once=_INPUTS_AT_ONCE, ranks_at_once=_RANKS_AT_ONCE, precision=precision,
    )  # fmt: skip
    _expand[blocks, triton.cdiv(outputs, _OUTPUTS_AT_ONCE)](
        y, y if residual is None else residual.contiguous(), order, numbers,
        tables[1], tables[2], tables[3], ranks, sums, count, outputs, most_ranks,
        together=together, outputs_at_once=_OUTPUTS_AT_ONCE, ranks_at_once=_RANKS_AT_ONCE,
        added=residual is not None, precision=precision,
    )  # fmt: skip
    return y


@triton.jit
def _rows_of_block(order, numbers, count, together: tl.constexpr):
    """Returns the rows that a program has, which of them there are, and the number of each one's adapter."""
    place = tl.program_id(0) * together + tl.arange(0, together)
    there = place < count
    row = tl.load(order + place, mask=there, other=0).to(tl.int64)
    number = tl.load(numbers + row, mask=there, other=0)
    return row, there, number


@triton.jit(do_not_specialize=["count"])
def _shrink(
    x, order, numbers, a_of, ranks_of, sums, count, inputs, most,
    together: tl.constexpr, inputs_at_once: tl.constexpr, ranks_at_once: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """sums, [rows, most], = x a^T of some rows and some ranks."""
    row, there, number = _rows_of_block(order, numbers, count, together)
    first_rank = tl.program_id(1) * ranks_at_once
    rank = first_rank + tl.arange(0, ranks_at_once)
    total = tl.zeros((together, ranks_at_once), tl.float32)
    for each in range(tl.min(tl.where(there, number, 1 << 30), 0), tl.max(number, 0) + 1):
        ranks = tl.load(ranks_of + each)
        if ranks > first_rank:
            a = tl.load(a_of + each).to(tl.pointer_type(x.dtype.element_ty))
            mine = there & (number == each)
            for start in range(0, inputs, inputs_at_once):
                column = start + tl.arange(0, inputs_at_once)
                real = column < inputs
                given = tl.load(
                    x + row[:, None] * inputs + column[None, :], mask=mine[:, None] & real[None, :], other=0.0
                )
                weights = tl.load(
                    a + rank[None, :] * inputs + column[:, None],
                    mask=(rank < ranks)[None, :] & real[:, None],
                    other=0.0,
                )
                total += tl.dot(given, weights, input_precision=precision)
    place = row[:, None] * most + rank[None, :]
    own = tl.load(ranks_of + number, mask=there, other=0)
    tl.store(sums + place, total.to(sums.dtype.element_ty), mask=rank[None, :] < own[:, None])


@triton.jit(do_not_specialize=["count"])
def _expand(
    y, residual, order, numbers, b_of, dora_scale_of, bias_delta_of, ranks_of, sums, count, outputs, most,
    together: tl.constexpr, outputs_at_once: tl.constexpr, ranks_at_once: tl.constexpr,
    added: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """y = dora_scale * y + sums b + bias_delta of some rows and some outputs, then the residual."""
    row, there, number = _rows_of_block(order, numbers, count, together)
    column = tl.program_id(1) * outputs_at_once + tl.arange(0, outputs_at_once)
    real = column < outputs
    total = tl.zeros((together, outputs_at_once), tl.float32)
    factor = tl.full((together, outputs_at_once), 1.0, tl.float32)
    for each in range(tl.min(tl.where(there, number, 1 << 30), 0), tl.max(number, 0) + 1):
        ranks = tl.load(ranks_of + each)
        if ranks > 0:
            mine = there & (number == each)
            b = tl.load(b_of + each).to(tl.pointer_type(y.dtype.element_ty))
            for start in range(0, ranks, ranks_at_once):
                rank = start + tl.arange(0, ranks_at_once)
                known = rank < ranks
                given = tl.load(
                    sums + row[:, None] * most + rank[None, :], mask=mine[:, None] & known[None, :], other=0.0
                )
                weights = tl.load(
                    b + rank[:, None] * outputs + column[None, :], mask=known[:, None] & real[None, :], other=0.0
                )
                total += tl.dot(given, weights, input_precision=precision)
            dora_scale = tl.load(dora_scale_of + each)
            if dora_scale != 0:
                dora_scales = tl.load(dora_scale.to(tl.pointer_type(tl.float32)) + column, mask=real, other=1.0)
                factor = tl.where(mine[:, None], dora_scales[None, :], factor)
            bias_delta = tl.load(bias_delta_of + each)
            if bias_delta != 0:
                bias_deltas = tl.load(bias_delta.to(tl.pointer_type(tl.float32)) + column, mask=real, other=0.0)
                total += tl.where(mine[:, None], bias_deltas[None, :], 0.0)
    place = row[:, None] * outputs + column[None, :]
    inside = there[:, None] & real[None, :]
    value = tl.load(y + place, mask=inside, other=0.0).to(tl.float32) * factor + total
    if added:
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, value.to(y.dtype.element_ty), mask=inside)
