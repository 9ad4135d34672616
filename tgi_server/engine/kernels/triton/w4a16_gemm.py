"""Products with weights of 4 or 8 bits on a GPU: one Triton kernel for all kinds of codes, for few rows and many.

A program takes some rows and some outputs, and goes over the inputs block by block. The inputs of a block belong to one
group; its codes become numbers of the input's dtype on their way from memory, and tensor cores multiply these.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from dataclasses import dataclass
from typing import Self

import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton.fp8 import E4M3_UNIT, decoded

_FEW_ROWS = 16


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The rows and outputs of a program, and how it is compiled."""

    rows: int
    outputs: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, itemsize: int) -> Self:
        """rows: of the input. itemsize: bytes of its numbers."""
        if itemsize == 4:  # no tensor cores: products take longer than loads, and more registers
            return cls(16, 32, warps=8, stages=1)
        if rows <= _FEW_ROWS:
            return cls(16, 32, warps=4, stages=4)
        return cls(64, 64, warps=4, stages=3) if rows <= 64 else cls(128, 64, warps=8, stages=3)


def multiply(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    codebook: Tensor | None,
    groups: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    kind: str,
    block: int,
    relu: bool,
) -> Tensor:
    """Returns [..., outputs] of x, [..., inputs], in its dtype; sums are in float32.

    codes: [blocks, outputs, bytes of a block]. scales, zeros: [groups, outputs]. groups: [blocks] int32, of each block.
    order: [blocks * block], the input at each place; None: all are where they were. residual: contiguous, of the
    result's shape. block: inputs of one.
    """
    inputs, outputs, width = x.shape[-1], codes.shape[1], codes.shape[2]
    y = x.new_empty(*x.shape[:-1], outputs)
    rows = x.reshape(-1, inputs)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    shape = ProductTile.of(len(rows), x.element_size())
    grid = triton.cdiv(outputs, shape.outputs), triton.cdiv(len(rows), shape.rows)
    _multiply_codes[grid](
        rows, codes, scales, zeros, codebook, groups, order, bias, residual, y,
        len(rows), outputs, inputs, len(groups), rows.stride(0),
        kind=kind, block=block, width=width, relu=relu,
        own_rows=shape.rows, own_outputs=shape.outputs, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])  # or some numbers of rows would be compiled for while requests wait
def _multiply_codes(
    x, codes, scales, zeros, codebook, groups, order, bias, residual, y, rows, outputs, inputs, blocks, x_stride,
    kind: tl.constexpr, block: tl.constexpr, width: tl.constexpr, own_rows: tl.constexpr, own_outputs: tl.constexpr,
    relu: tl.constexpr,
):  # fmt: skip
    """y = x W^T + bias of some rows and some outputs. width: bytes of a block's codes of one output."""
    row = tl.program_id(1) * own_rows + tl.arange(0, own_rows)
    output = tl.program_id(0) * own_outputs + tl.arange(0, own_outputs)
    place = tl.arange(0, width)
    real_rows, real_outputs = row < rows, output < outputs
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([own_rows, own_outputs], tl.float32)
    for index in range(0, blocks):
        at = tl.load(groups + index) * outputs + output
        scale = tl.load(scales + at, mask=real_outputs, other=0.0).to(tl.float32)[:, None]
        zero = scale * 0.0
        if zeros is not None:
            zero = tl.load(zeros + at, mask=real_outputs, other=0.0).to(tl.float32)[:, None]
        own_codes = codes + (index * outputs + output).to(tl.int64)[:, None] * width
        read = tl.load(own_codes + place[None, :], mask=real_outputs[:, None], other=0)
        part = read & 15 if width < block else read
        column = index * block + place
        own = _inputs(x_rows, order, column, inputs, real_rows)
        weights = ((_numbers(part, codebook, kind) - zero) * scale).to(own.dtype)
        sums = tl.dot(own, tl.trans(weights), sums, input_precision="ieee")
        if width < block:
            own = _inputs(x_rows, order, column + width, inputs, real_rows)
            weights = ((_numbers(read >> 4, codebook, kind) - zero) * scale).to(own.dtype)
            sums = tl.dot(own, tl.trans(weights), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + output, mask=real_outputs, other=0.0)[None, :]
    if relu:
        sums = tl.maximum(sums, 0.0)
    target = row.to(tl.int64)[:, None] * outputs + output[None, :]
    real = real_rows[:, None] & real_outputs[None, :]
    if residual is not None:
        sums += tl.load(residual + target, mask=real, other=0.0).to(tl.float32)
    tl.store(y + target, sums.to(y.dtype.element_ty), mask=real)


@triton.jit
def _inputs(x_rows, order, place, inputs, real_rows):
    """Returns what stands at some places of some rows, with zeros where there is nothing."""
    column = place
    if order is not None:
        column = tl.load(order + place)
    return tl.load(x_rows + column[None, :], mask=real_rows[:, None] & (column < inputs)[None, :], other=0.0)


@triton.jit
def _numbers(codes, codebook, kind: tl.constexpr):
    """Returns the float32 numbers that codes of a kind stand for."""
    if kind == "codebook":
        numbers = tl.load(codebook + codes.to(tl.int32))
    elif kind == "fp8":
        numbers = decoded(codes, 3).to(tl.float32) * E4M3_UNIT
    else:
        numbers = codes.to(tl.float32)
    return numbers
