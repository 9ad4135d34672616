"""The products of a mixture of experts on a GPU: each row by the weight of its expert, in one Triton kernel.

Rows are sorted by their experts, and a program takes some neighbours of one expert, and some outputs. Where the rows of
an expert begin stands in tables on the device: the host never needs to know, and a captured step holds for any routing.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from dataclasses import dataclass, replace
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton.routing import MOST_GROUPED, grouped_rows
from tgi_server.engine.kernels.triton.w4a16_gemm import WORDS, bits_of, block_sums, dequantize

# Bytes of dense weights that are made of quantized ones at a time; or those of one expert.
_DEQUANTIZED_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class GroupTile:
    """The rows, outputs and inputs that a program multiplies at once, and how it is compiled.

    inputs: 0 for quantized weights, which come in blocks.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, experts: int, itemsize: int, *, quantized: bool = False) -> Self:
        """rows: rows of all experts together. itemsize: bytes of a number. quantized: weights have 4 or 8 bits."""
        if itemsize == 4:  # no tensor cores: products take longer than loads, and more registers
            return cls(16, 32, 32, warps=8, stages=1)
        if quantized:  # whose numbers take registers
            return cls(16, 32, 0, warps=2, stages=4) if rows <= 16 * experts else cls(64, 64, 0, warps=4, stages=3)
        if rows <= 16 * experts:
            return cls(16, 64, 64, warps=4, stages=4)
        return cls(64, 64, 64, warps=4, stages=3) if rows <= 64 * experts else cls(128, 64, 64, warps=8, stages=3)


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The rows of a mixture's products, sorted by their experts. A token has a row for each of its experts.

    order: [rows] int64, the row at each place. starts: [experts + 1] int32, the first place of each expert's rows, and
    after them their number. tile_ends: [experts] int32; an expert's rows are cut into tiles of `tile`, and these are
    the tiles of the experts up to it. most_tiles: an upper bound of them all, known without asking the device.
    """

    order: Tensor
    starts: Tensor
    tile_ends: Tensor
    tile: GroupTile
    most_tiles: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int, itemsize: int, *, quantized: bool = False) -> Self:
        """chosen: int64 [tokens, experts of a token]. The others are those of GroupTile."""
        rows = chosen.numel()
        tile = GroupTile.of(rows, experts, itemsize, quantized=quantized)
        most_tiles = min(rows, rows // tile.rows + experts)
        if rows <= MOST_GROUPED:
            return cls(*grouped_rows(chosen.contiguous(), experts, tile.rows), tile, most_tiles)
        ordered, order = chosen.flatten().sort(stable=True)
        bounds = torch.arange(experts + 1, device=chosen.device, dtype=chosen.dtype)
        starts = torch.searchsorted(ordered, bounds, out_int32=True)
        tile_ends = ((starts.diff() + tile.rows - 1) // tile.rows).cumsum(0, dtype=torch.int32)
        return cls(order, starts, tile_ends, tile, most_tiles)

    def of_experts(self, first: int, count: int) -> Self:
        """Returns the rows of `count` experts from the first, at the places where they are."""
        ends = self.tile_ends[first : first + count]
        ends = ends - self.tile_ends[first - 1] if first else ends
        return replace(self, starts=self.starts[first : first + count + 1], tile_ends=ends)


def multiply_groups(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    groups: RowGroups,
    of_token: int = 0,
    shares: Tensor | None = None,
    y: Tensor | None = None,
) -> Tensor:
    """Returns the products of rows by their experts' weights, [rows, outputs]; sums are in float32.

    x: [tokens, inputs] where `of_token` is the number of rows that a token has, otherwise [rows, inputs] in the groups'
    order. weights: [experts, outputs, inputs], with any strides. bias: [experts, outputs]. shares: [rows], factors of
    the rows; the results are then in the order before sorting. None: the results stay sorted. y: the tensor for the
    result; None: a new one.
    """
    experts, outputs, inputs = weights.shape
    y = x.new_empty(len(groups.order), outputs) if y is None else y
    tile = groups.tile
    _multiply_groups[triton.cdiv(outputs, tile.outputs), groups.most_tiles](
        x.contiguous(), weights, bias, groups.order, groups.starts, groups.tile_ends, shares, y,
        experts, inputs, outputs, *weights.stride(),
        of_token, gathers=of_token > 0, all_experts=triton.next_power_of_2(experts),
        own_rows=tile.rows, own_outputs=tile.outputs, own_inputs=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def multiply_quantized_groups(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    codebook: Tensor | None,
    input_groups: Tensor,
    input_order: Tensor | None,
    bias: Tensor | None,
    groups: RowGroups,
    of_token: int = 0,
    shares: Tensor | None = None,
    *,
    kind: str,
    block: int,
) -> Tensor:
    """Returns what `multiply_groups` does, for weights of 4 or 8 bits.

    codes, scales, zeros, codebook, input_groups, input_order, kind, block: as `w4a16_gemm.multiply` takes them, of one
    weight that has the outputs of all experts, one after the other. input_order: [experts, places] where each expert
    has its own.
    """
    experts, inputs, (blocks, all_outputs, _) = len(groups.tile_ends), x.shape[-1], codes.shape
    outputs = all_outputs // experts
    y = x.new_empty(len(groups.order), outputs)
    tile = groups.tile
    _multiply_quantized_groups[triton.cdiv(outputs, tile.outputs), groups.most_tiles](
        x.contiguous(), codes, scales, zeros, codebook, input_groups, input_order, bias,
        groups.order, groups.starts, groups.tile_ends, shares, y,
        experts, inputs, outputs, blocks, of_token, _stride_of_experts(input_order),
        kind=kind, bits=bits_of(kind), block=block, words=WORDS,
        whole=input_order is None and inputs == blocks * block, gathers=of_token > 0,
        all_experts=triton.next_power_of_2(experts), own_rows=tile.rows, own_outputs=tile.outputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def multiply_dequantized_groups(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    codebook: Tensor | None,
    input_groups: Tensor,
    input_order: Tensor | None,
    bias: Tensor | None,
    groups: RowGroups,
    of_token: int = 0,
    shares: Tensor | None = None,
    *,
    kind: str,
    block: int,
) -> Tensor:
    """Returns what `multiply_quantized_groups` does, by the dense weights of some experts at a time: for many rows.

    groups: for dense weights.
    """
    experts, inputs, (blocks, all_outputs, _) = len(groups.tile_ends), x.shape[-1], codes.shape
    outputs, places = all_outputs // experts, blocks * block
    y = x.new_empty(len(groups.order), outputs)
    # the place of each input: places without an input come last in the order
    place_of = None if input_order is None else input_order.expand(experts, -1).argsort(1)[:, None, :inputs]
    at_once = max(1, _DEQUANTIZED_BYTES // (outputs * places * x.element_size()))
    for first in range(0, experts, at_once):
        count = min(at_once, experts - first)
        of_some = {"first": first * outputs, "count": count * outputs}
        flat = dequantize(
            codes, scales, zeros, codebook, input_groups, kind=kind, block=block, dtype=x.dtype, **of_some
        )
        weights = flat.view(count, outputs, places)
        if place_of is None:
            weights = weights[..., :inputs]
        else:
            weights = weights.gather(2, place_of[first : first + count].expand(-1, outputs, -1))
        own_bias = None if bias is None else bias[first : first + count]
        multiply_groups(x, weights, own_bias, groups.of_experts(first, count), of_token, shares, y)
    return y


def _stride_of_experts(input_order: Tensor | None) -> int:
    return 0 if input_order is None or input_order.dim() == 1 else input_order.stride(0)


@triton.jit
def _rows_of_tile(order, starts, tile_ends, experts, all_experts: tl.constexpr, own_rows: tl.constexpr):
    """Returns the expert of this program's tile, or `experts` for none; and its places, rows, and which there are."""
    tile = tl.program_id(1)
    known = tl.arange(0, all_experts)
    ends = tl.load(tile_ends + known, mask=known < experts, other=0x7FFFFFFF)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    there = expert < experts
    first_tile = tl.load(tile_ends + expert - 1, mask=there & (expert > 0), other=0)
    place = tl.load(starts + expert) + (tile - first_tile) * own_rows + tl.arange(0, own_rows)
    real_rows = place < tl.load(starts + expert + 1, mask=there, other=0)
    row = tl.load(order + place, mask=real_rows, other=0)
    return expert, place, row, real_rows


@triton.jit
def _store_rows(sums, bias, shares, y, expert, place, row, real_rows, output, outputs):
    """Writes the sums of a tile, [rows, outputs], with the expert's bias, to where `multiply_groups` says."""
    real_outputs = output < outputs
    if bias is not None:
        sums += tl.load(bias + expert * outputs + output, mask=real_outputs, other=0.0).to(tl.float32)[None, :]
    target = place.to(tl.int64)
    if shares is not None:
        sums *= tl.load(shares + row, mask=real_rows, other=0.0).to(tl.float32)[:, None]
        target = row
    there = real_rows[:, None] & real_outputs[None, :]
    tl.store(y + target[:, None] * outputs + output[None, :], sums.to(y.dtype.element_ty), mask=there)


# Parts of tables begin at any address.
@triton.jit(do_not_specialize=["of_token", "starts", "tile_ends", "bias"])
def _multiply_groups(
    x, weights, bias, order, starts, tile_ends, shares, y,
    experts, inputs, outputs, expert_stride, output_stride, input_stride, of_token,
    gathers: tl.constexpr, all_experts: tl.constexpr,
    own_rows: tl.constexpr, own_outputs: tl.constexpr, own_inputs: tl.constexpr,
):  # fmt: skip
    expert, place, row, real_rows = _rows_of_tile(order, starts, tile_ends, experts, all_experts, own_rows)
    if expert >= experts:
        return
    source = row // of_token if gathers else place.to(tl.int64)
    output = tl.program_id(0) * own_outputs + tl.arange(0, own_outputs)
    real_outputs = output < outputs
    column = tl.arange(0, own_inputs)
    x_places = x + source[:, None] * inputs + column[None, :]
    own_weights = weights + expert.to(tl.int64) * expert_stride + output.to(tl.int64)[None, :] * output_stride
    sums = tl.zeros([own_rows, own_outputs], tl.float32)
    for first in range(0, inputs, own_inputs):
        real = first + column < inputs
        own = tl.load(x_places + first, mask=real_rows[:, None] & real[None, :], other=0.0)
        weight = tl.load(
            own_weights + (first + column).to(tl.int64)[:, None] * input_stride,
            mask=real[:, None] & real_outputs[None, :],
            other=0.0,
        )
        sums = tl.dot(own, weight, sums, input_precision="ieee")
    _store_rows(sums, bias, shares, y, expert, place, row, real_rows, output, outputs)


@triton.jit(do_not_specialize=["of_token", "blocks", "order_stride"])
def _multiply_quantized_groups(
    x, codes, scales, zeros, codebook, input_groups, input_order, bias, order, starts, tile_ends, shares, y,
    experts, inputs, outputs, blocks, of_token, order_stride,
    kind: tl.constexpr, bits: tl.constexpr, block: tl.constexpr, words: tl.constexpr, whole: tl.constexpr,
    gathers: tl.constexpr, all_experts: tl.constexpr, own_rows: tl.constexpr, own_outputs: tl.constexpr,
):  # fmt: skip
    expert, place, row, real_rows = _rows_of_tile(order, starts, tile_ends, experts, all_experts, own_rows)
    if expert >= experts:
        return
    source = row // of_token if gathers else place.to(tl.int64)
    output = tl.program_id(0) * own_outputs + tl.arange(0, own_outputs)
    real_outputs = output < outputs
    own_order = input_order
    if input_order is not None:
        own_order = input_order + expert.to(tl.int64) * order_stride
    sums = block_sums(
        x + source[:, None] * inputs, codes, scales, zeros, codebook, input_groups, own_order,
        expert * outputs + output, real_rows, real_outputs, experts * outputs, inputs, 0, blocks, blocks,
        kind, bits, block, words, own_rows, own_outputs, whole,
    )  # fmt: skip
    _store_rows(sums, bias, shares, y, expert, place, row, real_rows, output, outputs)
