"""Products with few rows on a GPU, whose time is that of reading the weight, in one Triton kernel.

It normalises its inputs, and applies the activation, a gate and the residual to its outputs, so that a decoder layer
has no other kernels around its products. A program takes some outputs of all rows, and a part of the inputs (split-K).
The part that is done last adds up all of them, in their order.

Inputs are divided by the root r of their mean square after the product: (x / r * w) W^T = (x * w) W^T / r. So no
program waits for a row's statistics, which are sums over parts like the others.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton import multiprocessors
from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier
from tgi_server.engine.kernels.triton.norm_and_gate import activated
from tgi_server.engine.kernels.triton.split_kv import part_of

# Maximum number of rows with dense weights, and with weights in FP8.
MOST_ROWS, MOST_ROWS_FP8 = 16, 64
# Maximum number of parts of the inputs, and minimum number of blocks of a part, since starting a part takes time.
_MOST_PARTS = 8
_FEWEST_BLOCKS = 4
# Programs that a multiprocessor is given.
_PROGRAMS_PER_PROCESSOR = 8
# Sums of parts that a thread adds up at once.
_SUMS_OF_THREAD = 64
# The bits of e4m3, read as bfloat16, are 2^-120 of the number. Inputs and sums are each multiplied by 2^60 for that.
_LIFTED = tl.constexpr(2.0**60)


@dataclass(frozen=True, slots=True)
class FewRowsTile:
    """The rows, outputs and inputs at once of a program, and how it is compiled."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int) -> Self:
        return cls(max(16, triton.next_power_of_2(rows)), 64, 128, warps=4, stages=4)

    @property
    def parts_at_once(self) -> int:
        """The parts whose sums a program has room for in its registers, beside each other."""
        return max(1, _SUMS_OF_THREAD * 32 * self.warps // (self.rows * self.outputs))


@dataclass(frozen=True, slots=True)
class InputNorm:
    """The norm of a product's inputs: an RMS norm, or, if `centred`, a layer norm.

    weight: [inputs]. eps: is added under the root. bias: [outputs] float32, of the product, with what the norm's bias
    adds to it; None: nothing is added. sums: [outputs] float32, what a mean of 1 adds to the product; None: it is not
    centred.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    sums: Tensor | None = None


def arrivals(outputs: int, device: torch.device) -> Tensor:
    """Returns zeros, in which `multiply_few` counts a weight's finished parts; every product leaves zeros again."""
    return torch.zeros(outputs, dtype=torch.int32, device=device)


def multiply_few(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    arrived: Tensor,
    *,
    norm: InputNorm | None = None,
    activation: str = "",
    gated: bool = False,
) -> Tensor:
    """Returns residual + activation(norm(x) W^T + bias), [rows, outputs], in the dtype of x; sums are in float32.

    x: [rows, inputs], at most MOST_ROWS or MOST_ROWS_FP8. weight: [outputs, inputs], contiguous, in the dtype of x; or
    e4m3 as uint8, with x in bfloat16. scales: scales of e4m3 weights, [groups, outputs]; a group is 128 inputs, or all.
    bias: [outputs] float32. residual: [rows, outputs], contiguous. arrived: see `arrivals`. activation: "" for none.
    gated: the first half of the outputs is the gate of the second half, and there is no residual.
    """
    (rows, inputs), outputs = x.shape, len(weight)
    x = x if x.stride(1) == 1 else x.contiguous()
    made = outputs // 2 if gated else outputs
    y = x.new_empty(rows, made)
    shape = FewRowsTile.of(rows)
    tiles, blocks = triton.cdiv(outputs, shape.outputs), triton.cdiv(inputs, shape.inputs)
    if gated:
        tiles = triton.cdiv(made, shape.outputs // 2)
    wanted = _PROGRAMS_PER_PROCESSOR * multiprocessors(x.device) // tiles
    parts = max(1, min(wanted, blocks // _FEWEST_BLOCKS, _MOST_PARTS))
    sums = x.new_empty(tiles * parts, shape.rows, shape.outputs + 2, dtype=torch.float32) if parts > 1 else y
    if norm is not None:
        bias = norm.bias
    _multiply_few[tiles, parts](
        x, weight, scales, bias, residual, y, sums, arrived,
        None if norm is None else norm.weight, None if norm is None else norm.sums, 0.0 if norm is None else norm.eps,
        rows, made, inputs, x.stride(0),
        grouped=scales is not None and len(scales) > 1, activation=activation, gated=gated,
        whole=inputs % shape.inputs == 0, split=parts > 1, parts_at_once=shape.parts_at_once,
        own_rows=shape.rows, own_outputs=shape.outputs, own_inputs=shape.inputs,
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(x.device),
    )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["rows"])
def _multiply_few(
    x, weight, scales, bias, residual, y, sums, arrived, norm_weight, norm_sums, eps,
    rows, outputs, inputs, x_stride,
    grouped: tl.constexpr, activation: tl.constexpr, gated: tl.constexpr,
    whole: tl.constexpr, split: tl.constexpr, parts_at_once: tl.constexpr,
    own_rows: tl.constexpr, own_outputs: tl.constexpr, own_inputs: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    """outputs: those of y; gated products have a tile of both halves. whole: inputs are whole tiles. split: parts > 1.

    sums: [tiles, parts, rows, outputs + 2]; after a row's outputs are the sums of its squares and of its numbers.
    """
    if pdl:
        wait_for_earlier()
    tile, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    number, row = tl.arange(0, own_outputs), tl.arange(0, own_rows)
    half: tl.constexpr = own_outputs // 2
    all_outputs = outputs
    if gated:
        all_outputs = 2 * outputs
        output = tile * half + number % half
        real_outputs = output < outputs
        output = tl.where(number < half, output, outputs + output)
    else:
        output = tile * own_outputs + number
        real_outputs = output < outputs
    real_rows = row < rows
    x_rows, weights = x + row[:, None] * x_stride, weight + output.to(tl.int64)[:, None] * inputs
    begin, end = part_of(part, parts, 0, tl.cdiv(inputs, own_inputs))

    # The weight comes first in a product: its outputs are the longer side.
    total = tl.zeros([own_outputs, own_rows], tl.float32)
    squares = tl.zeros([own_rows], tl.float32)
    ones = tl.zeros([own_rows], tl.float32)
    if norm_weight is not None:  # of which the next block's are loaded while one is multiplied
        factors = _factors(norm_weight, begin * own_inputs + tl.arange(0, own_inputs), inputs, scales)
    for index in range(begin, end):
        column = index * own_inputs + tl.arange(0, own_inputs)
        if whole:
            read = tl.load(weights + column[None, :], mask=real_outputs[:, None], other=0)
            own = tl.load(x_rows + column[None, :], mask=real_rows[:, None], other=0.0)
        else:
            held = (column < inputs)[None, :]
            read = tl.load(weights + column[None, :], mask=real_outputs[:, None] & held, other=0)
            own = tl.load(x_rows + column[None, :], mask=real_rows[:, None] & held, other=0.0)
        if norm_weight is not None or scales is not None:
            wide = own.to(tl.float32)
            if norm_weight is not None:
                squares += tl.sum(wide * wide, 1)
                if norm_sums is not None:
                    ones += tl.sum(wide, 1)
                wide *= factors[None, :]
                factors = _factors(norm_weight, own_inputs + column, inputs, scales)
            elif scales is not None:
                wide *= _LIFTED
            own = wide.to(own.dtype)
        if scales is not None:
            read = ((read.to(tl.int8, bitcast=True).to(tl.int16) << 4) & -30736).to(tl.bfloat16, bitcast=True)
        if grouped:
            group = index * own_inputs // 128
            scale = tl.load(scales + group * all_outputs + output, mask=real_outputs, other=0.0) * _LIFTED
            total += tl.dot(read, tl.trans(own), input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(read, tl.trans(own), total, input_precision="ieee")
    if scales is not None and not grouped:
        total *= (tl.load(scales + output, mask=real_outputs, other=0.0) * _LIFTED)[:, None]

    if split:
        width: tl.constexpr = own_outputs + 2
        place = ((tile * parts + part) * own_rows + row) * width
        tl.store(sums + place[None, :] + number[:, None], total, mask=real_rows[None, :])
        if norm_weight is not None:
            tl.store(sums + place + own_outputs, squares, mask=real_rows)
        if norm_sums is not None:
            tl.store(sums + place + own_outputs + 1, ones, mask=real_rows)
        tl.debug_barrier()  # before one thread says that all have stored
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") != parts - 1:
            return
        tl.store(arrived + tile, 0)
        total, squares, ones = tl.zeros_like(total), tl.zeros_like(squares), tl.zeros_like(ones)
        for first in range(0, parts, parts_at_once):
            other = first + tl.arange(0, parts_at_once)
            kept = ((tile * parts + other[:, None]) * own_rows + row[None, :]) * width
            there = (other < parts)[:, None] & real_rows[None, :]
            added = tl.load(sums + kept[:, None, :] + number[None, :, None], mask=there[:, None, :], other=0.0,
                            cache_modifier=".cg")  # fmt: skip
            total += tl.sum(added, 0)
            if norm_weight is not None:
                squares += tl.sum(tl.load(sums + kept + own_outputs, mask=there, other=0.0, cache_modifier=".cg"), 0)
            if norm_sums is not None:
                ones += tl.sum(tl.load(sums + kept + own_outputs + 1, mask=there, other=0.0, cache_modifier=".cg"), 0)
    if norm_weight is not None:
        mean = ones / inputs
        if norm_sums is not None:
            total -= tl.load(norm_sums + output, mask=real_outputs, other=0.0)[:, None] * mean[None, :]
        total *= tl.rsqrt(squares / inputs - mean * mean + eps)[None, :]
    if bias is not None:
        total += tl.load(bias + output, mask=real_outputs, other=0.0)[:, None]
    if gated:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, half, own_rows)), (1, 2, 0)))
        total = activated(gate, activation) * up
        output = tile * half + tl.arange(0, half)
    elif activation != "":
        total = activated(total, activation)
    target = row[None, :] * outputs + output[:, None]
    real = real_rows[None, :] & (output < outputs)[:, None]
    if residual is not None:
        total += tl.load(residual + target, mask=real, other=0.0).to(tl.float32)
    tl.store(y + target, total.to(y.dtype.element_ty), mask=real)


@triton.jit
def _factors(norm_weight, column, inputs, scales):
    """Returns the factors of inputs before a product, float32."""
    factors = tl.load(norm_weight + column, mask=column < inputs, other=0.0).to(tl.float32)
    if scales is not None:
        factors *= _LIFTED
    return factors
