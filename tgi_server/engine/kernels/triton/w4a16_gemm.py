"""Products of few rows with quantized weights of all kinds on a GPU, in one Triton kernel.

A program takes some rows and some outputs, and goes over a part of the inputs (split-K), block by block. The inputs of
a block belong to one group; its codes lie in words, 16 to a block: the first code of each belongs to the
first 16 inputs, the second to the next 16. Codes are converted to the input's dtype in registers, tensor cores multiply
them, and the sums of a block are scaled. For many rows the weight is dequantized first, and cuBLAS multiplies.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, pad

from tgi_server.engine.kernels.triton import multiprocessors
from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier
from tgi_server.engine.kernels.triton.fp8 import E4M3_UNIT, decoded

# Words of a block: inputs of the smallest product that tensor cores compute.
WORDS = 16
_FEW_ROWS = 16
# From this many rows on it pays to write a dense weight and read it again.
DENSE_ROWS = 129
# Programs that a multiprocessor needs to load without a pause, and minimum number of blocks for which a part pays off.
_PROGRAMS_PER_PROCESSOR = 8
_FEWEST_BLOCKS = 8
_SUMMED_AT_ONCE = 512
_EXPANDED_OUTPUTS = 64


@dataclass(frozen=True, slots=True)
class ProductTile:
    """The rows and outputs of a program, and how it is compiled."""

    rows: int
    outputs: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, itemsize: int) -> Self:
        """rows: rows of the input. itemsize: bytes of its elements."""
        if itemsize == 4:  # no tensor cores: products take longer than loads, and more registers
            return cls(16, 32, warps=8, stages=1)
        if rows <= _FEW_ROWS:
            return cls(16, 64, warps=2, stages=4)
        return cls(64, 64, warps=4, stages=4)


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
) -> Tensor:
    """Returns [..., outputs] of x, [..., inputs], in its dtype; sums are in float32.

    codes: [blocks, outputs, WORDS], integers. scales, zeros: [groups, outputs]. groups: [blocks] int32, of each block.
    order: [blocks * block], the input at each place; None: all are where they were. residual: contiguous, of the
    result's shape. block: inputs of one.
    """
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) >= DENSE_ROWS:
        weight = dequantize(codes, scales, zeros, codebook, groups, kind=kind, block=block, dtype=x.dtype)
        y = _multiply_dense(rows, weight, order, bias, residual)
        return y.view(*x.shape[:-1], len(weight))
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    (count, inputs), (blocks, outputs, _) = rows.shape, codes.shape
    y = x.new_empty(*x.shape[:-1], outputs)
    if not count:  # a chunk of a prompt that yields no logits has no rows for the head
        return y
    shape = ProductTile.of(count, x.element_size())
    tiles = triton.cdiv(outputs, shape.outputs), triton.cdiv(count, shape.rows)
    wanted = _PROGRAMS_PER_PROCESSOR * multiprocessors(x.device) // (tiles[0] * tiles[1])
    share = triton.cdiv(blocks, max(1, min(wanted, blocks // _FEWEST_BLOCKS)))
    splits = triton.cdiv(blocks, share)
    sums = y if splits == 1 else x.new_empty(splits, count, outputs, dtype=torch.float32)
    _multiply_codes[(*tiles, splits)](
        rows, codes, scales, zeros, codebook, groups, order, bias, residual, sums,
        count, outputs, inputs, blocks, share, rows.stride(0),
        kind=kind, bits=bits_of(kind), block=block, words=WORDS, whole=order is None and inputs == blocks * block,
        split=splits > 1,
        own_rows=shape.rows, own_outputs=shape.outputs, num_warps=shape.warps, num_stages=shape.stages,
        **launch_options(x.device),
    )  # fmt: skip
    if splits > 1:
        _add_splits[count, triton.cdiv(outputs, _SUMMED_AT_ONCE)](
            sums, bias, residual, y, outputs, splits, at_once=_SUMMED_AT_ONCE, num_warps=4,
            **launch_options(x.device),
        )  # fmt: skip
    return y


def dequantize(
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    codebook: Tensor | None,
    groups: Tensor,
    *,
    kind: str,
    block: int,
    dtype: torch.dtype,
    first: int = 0,
    count: int | None = None,
) -> Tensor:
    """Returns the dense weight, [count, places], of `count` outputs from the first; None: of all.

    The other arguments are those of `multiply`.
    """
    blocks, outputs, _ = codes.shape
    count = outputs if count is None else count
    weight = torch.empty(count, blocks * block, dtype=dtype, device=codes.device)
    _expand[blocks, triton.cdiv(count, _EXPANDED_OUTPUTS)](
        codes, scales, zeros, codebook, groups, weight, outputs, blocks * block, first, count,
        kind=kind, bits=bits_of(kind), block=block, words=WORDS, own_outputs=_EXPANDED_OUTPUTS, num_warps=4,
    )  # fmt: skip
    return weight


def bits_of(kind: str) -> int:
    """Returns the bits of a code."""
    return 4 if kind in ("int4", "codebook") else 8


def _multiply_dense(
    rows: Tensor, weight: Tensor, order: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """weight: [outputs, places], in the order that `order` says."""
    if order is not None or rows.shape[1] != weight.shape[1]:
        rows = pad(rows, (0, max(weight.shape[1] - rows.shape[1], 1)))
        rows = rows[:, : weight.shape[1]] if order is None else rows.index_select(1, order)
    if bias is None and residual is not None:
        return torch.addmm(residual.reshape(len(rows), -1), rows, weight.t())
    y = linear(rows, weight, None if bias is None else bias.to(rows.dtype))
    return y if residual is None else y.add_(residual.reshape(y.shape))


# Specialisation on these numbers would compile further kernels while requests wait.
@triton.jit(do_not_specialize=["rows", "blocks", "share"])
def _multiply_codes(
    x, codes, scales, zeros, codebook, groups, order, bias, residual, y,
    rows, outputs, inputs, blocks, share, x_stride,
    kind: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, words: tl.constexpr,
    own_rows: tl.constexpr, own_outputs: tl.constexpr, whole: tl.constexpr, split: tl.constexpr,
    pdl: tl.constexpr = False,
):  # fmt: skip
    """y = x W^T + bias of some rows and some outputs.

    whole: there are as many inputs as places, in this order. split: y is float32, [splits, rows, outputs], and gets the
    bare sums over `share` blocks.
    """
    if pdl:
        wait_for_earlier()
    row = tl.program_id(1) * own_rows + tl.arange(0, own_rows)
    output = tl.program_id(0) * own_outputs + tl.arange(0, own_outputs)
    real_rows, real_outputs = row < rows, output < outputs
    x_rows = x + row.to(tl.int64)[:, None] * x_stride
    begin = tl.program_id(2) * share
    sums = block_sums(
        x_rows, codes, scales, zeros, codebook, groups, order, output, real_rows, real_outputs,
        outputs, inputs, begin, tl.minimum(begin + share, blocks), blocks,
        kind, bits, block, words, own_rows, own_outputs, whole,
    )  # fmt: skip
    target = row.to(tl.int64)[:, None] * outputs + output[None, :]
    real = real_rows[:, None] & real_outputs[None, :]
    if split:
        tl.store(y + tl.program_id(2).to(tl.int64) * rows * outputs + target, sums, mask=real)
    else:
        _finish(sums, bias, residual, y, output[None, :], target, real)


@triton.jit
def block_sums(
    x_rows, codes, scales, zeros, codebook, groups, order, output, real_rows, real_outputs,
    all_outputs, inputs, begin, end, blocks,
    kind: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, words: tl.constexpr,
    own_rows: tl.constexpr, own_outputs: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Returns the sums of some rows and outputs over the blocks from `begin` to before `end`, [rows, outputs] float32.

    x_rows: where each row begins. output: places among the `all_outputs` of a block. whole: there are as many inputs as
    places, in this order.
    """
    place = tl.arange(0, words)
    # Scales are loaded one block ahead, and the group that they are of two blocks ahead.
    scale, zero = _scale(scales, zeros, tl.load(groups + begin) * all_outputs + output, real_outputs, kind)
    group = tl.load(groups + tl.minimum(begin + 1, blocks - 1))
    # The weight comes first in a product, for there its numbers stay in the registers that they were computed in.
    sums = tl.zeros([own_outputs, own_rows], tl.float32)
    for index in range(begin, end):
        next_scale, next_zero = _scale(scales, zeros, group * all_outputs + output, real_outputs, kind)
        group = tl.load(groups + tl.minimum(index + 2, blocks - 1))
        own_codes = codes + (index * all_outputs + output).to(tl.int64)[:, None] * words
        read = tl.load(own_codes + place[None, :], mask=real_outputs[:, None], other=0)
        products = tl.zeros([own_outputs, own_rows], tl.float32)
        inputs_sum = tl.zeros([own_outputs, own_rows], tl.float32)
        for number in tl.static_range(0, block // words):
            own = _inputs(x_rows, order, index * block + number * words + place, inputs, real_rows, whole)
            weights = _numbers(read, number, codebook, kind, bits).to(own.dtype)
            products = tl.dot(weights, tl.trans(own), products, input_precision="ieee")
            if zeros is not None:
                ones = tl.full([own_outputs, words], 1.0, tl.float32).to(own.dtype)
                inputs_sum = tl.dot(ones, tl.trans(own), inputs_sum, input_precision="ieee")
        if zeros is not None:
            products -= inputs_sum * zero[:, None]
        sums += products * scale[:, None]
        scale, zero = next_scale, next_zero
    return tl.trans(sums)


@triton.jit(do_not_specialize=["splits"])
def _add_splits(sums, bias, residual, y, outputs, splits, at_once: tl.constexpr, pdl: tl.constexpr = False):
    """Writes the total of the parts of a row's inputs. sums: [splits, rows, outputs]."""
    if pdl:
        wait_for_earlier()
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    output = tl.program_id(1) * at_once + tl.arange(0, at_once)
    total = tl.zeros([at_once], tl.float32)
    for index in range(0, splits):
        total += tl.load(sums + (index * rows + row) * outputs + output, mask=output < outputs, other=0.0)
    _finish(total, bias, residual, y, output, row * outputs + output, output < outputs)


@triton.jit
def _finish(sums, bias, residual, y, output, target, real):
    if bias is not None:
        sums += tl.load(bias + output, mask=real, other=0.0)
    if residual is not None:
        sums += tl.load(residual + target, mask=real, other=0.0).to(tl.float32)
    tl.store(y + target, sums.to(y.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["first"])
def _expand(
    codes, scales, zeros, codebook, groups, weight, outputs, places, first, count,
    kind: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, words: tl.constexpr, own_outputs: tl.constexpr,
):  # fmt: skip
    """Writes the dense numbers of a block's inputs and some of `count` outputs. places: inputs of all blocks."""
    index = tl.program_id(0)
    row = tl.program_id(1) * own_outputs + tl.arange(0, own_outputs)
    place, real, output = tl.arange(0, words), row < count, first + row
    scale, zero = _scale(scales, zeros, tl.load(groups + index) * outputs + output, real, kind)
    own_codes = codes + (index * outputs + output).to(tl.int64)[:, None] * words
    read = tl.load(own_codes + place[None, :], mask=real[:, None], other=0)
    target = weight + row.to(tl.int64)[:, None] * places + index * block + place[None, :]
    for number in tl.static_range(0, block // words):
        numbers = _numbers(read, number, codebook, kind, bits).to(tl.float32)
        if zeros is not None:
            numbers -= zero[:, None]
        numbers *= scale[:, None]
        tl.store(target + number * words, numbers.to(weight.dtype.element_ty), mask=real[:, None])


@triton.jit
def _scale(scales, zeros, at, real, kind: tl.constexpr):
    """Returns the scales of some outputs, and the zeros that are subtracted before scaling, float32."""
    scale = tl.load(scales + at, mask=real, other=0.0).to(tl.float32)
    if kind == "fp8":
        scale = scale * E4M3_UNIT
    zero = scale
    if zeros is not None:
        zero = tl.load(zeros + at, mask=real, other=0.0).to(tl.float32)
    return scale, zero


@triton.jit
def _inputs(x_rows, order, place, inputs, real_rows, whole: tl.constexpr):
    """Returns the inputs at some places of some rows, and zeros for padding."""
    column = place
    if order is not None:
        column = tl.load(order + place)
    real = real_rows[:, None] if whole else real_rows[:, None] & (column < inputs)[None, :]
    return tl.load(x_rows + column[None, :], mask=real, other=0.0)


@triton.jit
def _numbers(read, number: tl.constexpr, codebook, kind: tl.constexpr, bits: tl.constexpr):
    """Returns the numbers of the codes with index `number` in each word; for FP8 divided by a constant."""
    word = read.to(tl.int32)
    if kind == "codebook":
        numbers = tl.load(codebook + ((word >> (number * bits)) & 15))
    elif kind == "fp8":
        numbers = decoded((word >> (number * bits)) & 255, 3)
    else:
        # Devices convert integers slowly. So a code becomes the last bits of a number's 23, which is a power of 2 so
        # large that they stand for integers, or where they are further left, of one that is as much smaller.
        first: tl.constexpr = number * bits % (20 if bits == 4 else 16)
        unit: tl.constexpr = 2.0 ** (23 - first)
        mask: tl.constexpr = (2**bits - 1) << first
        if kind == "int8":
            word = word ^ -2139062144  # adds 128 to each code, modulo 256
        shifted = word >> (number * bits - first)
        raised = (shifted & mask) | ((150 - first) << 23)
        numbers = raised.to(tl.float32, bitcast=True) - (unit + 128.0 if kind == "int8" else unit)
    return numbers
