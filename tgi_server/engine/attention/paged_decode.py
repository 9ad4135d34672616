"""Attention of one token a sequence over its KV blocks, as Triton kernels: scaled, windowed, soft-capped, with alibi.

A program takes one sequence, one KV head with all query heads that share it, and a part of the sequence's keys; a
second kernel puts the parts together ("flash decoding", Dao et al. 2023). How many parts there are depends on the
number of sequences alone, and how long those are is read on the device: so a CUDA graph holds for any lengths.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.attention.base import AttentionVariant

_MAX_SPLITS = 32
_PROGRAMS_PER_PROCESSOR = 2
# Rows of a product that tensor cores compute; where fewer heads share their keys, the other rows are empty.
_FEWEST_ROWS = 16
# Elements of the output that a program holds, from which on more warps share them.
_LARGE = 64 * 128


def paged_decode(
    query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, variant: AttentionVariant
) -> Tensor:
    """query: [sequences, heads, head_dim]; keys and values: [blocks, block_size, kv_heads, head_dim], contiguous.

    tables: [sequences, blocks] int32. lengths: [sequences] int32, at least 1; tokens of each sequence. Returns a
    contiguous tensor of query's shape.
    """
    sequences, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = keys.shape
    group = heads // kv_heads
    rows, width = max(_FEWEST_ROWS, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(head_dim))
    tile = 64 if width * query.element_size() <= 256 else 32
    splits = _splits(sequences * kv_heads, tables.shape[1] * block_size // tile, query.device)
    output = query.new_empty(query.shape)
    parts = query.new_empty(sequences, kv_heads, splits, rows, width, dtype=torch.float32)
    weights = query.new_empty(sequences, kv_heads, splits, rows, dtype=torch.float32)
    warps = 8 if rows * width > _LARGE else 4
    if query.stride(2) != 1:
        query = query.contiguous()
    _attend_part[sequences, kv_heads, splits](
        query, keys, values, tables, lengths,
        query if variant.alibi_slopes is None else variant.alibi_slopes,
        output, parts, weights,
        query.stride(0), query.stride(1), tables.stride(0), variant.scaling, variant.softcap, variant.window,
        kv_heads=kv_heads, group=group, head_dim=head_dim, block_size=block_size,
        rows=rows, width=width, tile=tile, splits=splits,
        windowed=variant.window > 0, capped=variant.softcap > 0,
        alibi=variant.alibi_slopes is not None, rounded_alibi=variant.rounded_alibi,
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        _join_parts[sequences, kv_heads](
            parts, weights, output,
            kv_heads=kv_heads, group=group, head_dim=head_dim, rows=rows, width=width, splits=splits, num_warps=warps,
        )  # fmt: skip
    return output


def _splits(programs: int, tiles: int, device: torch.device) -> int:
    """Returns the number of parts, a power of two, into which a sequence is cut so that all processors have work."""
    wanted = -(-_PROGRAMS_PER_PROCESSOR * _processors(device) // programs)
    return int(triton.next_power_of_2(max(1, min(wanted, tiles, _MAX_SPLITS))))


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _attend_part(
    query, keys, values, tables, lengths, slopes, output, parts, weights,
    query_stride, head_stride, table_stride, scaling, softcap, window,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, block_size: tl.constexpr,
    rows: tl.constexpr, width: tl.constexpr, tile: tl.constexpr, splits: tl.constexpr,
    windowed: tl.constexpr, capped: tl.constexpr, alibi: tl.constexpr, rounded_alibi: tl.constexpr,
):  # fmt: skip
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + sequence)
    first = tl.maximum(length - window, 0) if windowed else 0
    first_tile = first // tile
    share = tl.cdiv(tl.cdiv(length, tile) - first_tile, splits)
    begin = (first_tile + split * share) * tile
    end = tl.minimum(begin + share * tile, length)

    row, column, place = tl.arange(0, rows), tl.arange(0, width), tl.arange(0, tile)
    head = kv_head * group + row
    real = (row < group)[:, None] & (column < head_dim)[None, :]
    # long sequences times many heads exceed 32 bits
    query_places = sequence.to(tl.int64) * query_stride + head[:, None] * head_stride + column[None, :]
    q = tl.load(query + query_places, mask=real, other=0.0)
    slope = tl.load(slopes + head, mask=row < group, other=0.0) if alibi else row

    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, width], tl.float32)
    for start in range(begin, end, tile):
        position = start + place
        seen = (position >= first) & (position < length)
        block = tl.load(tables + sequence * table_stride + position // block_size, mask=position < length, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        kv_places = (slot[:, None] * kv_heads + kv_head) * head_dim + column[None, :]
        held = (position < length)[:, None] & (column < head_dim)[None, :]
        k = tl.load(keys + kv_places, mask=held, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if capped:
            # tanh, of which Triton has none of its own
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        if alibi:
            if rounded_alibi:
                bias = slope[:, None] * _rounded(position.to(tl.float32))[None, :]
                scores += _rounded(bias) * scaling
            else:
                scores += slope[:, None] * position[None, :].to(tl.float32)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        faded = tl.exp(highest - higher)
        likelihood = tl.exp(scores - higher[:, None])
        v = tl.load(values + kv_places, mask=held, other=0.0)
        sums = sums * faded[:, None] + tl.dot(likelihood.to(v.dtype), v, input_precision="ieee")
        total = total * faded + tl.sum(likelihood, 1)
        highest = higher

    # a part without keys has a total of 0 and weighs nothing
    mean = sums / tl.where(total > 0, total, 1.0)[:, None]
    if splits == 1:
        output_places = (sequence.to(tl.int64) * kv_heads * group + head[:, None]) * head_dim + column[None, :]
        tl.store(output + output_places, mean.to(output.dtype.element_ty), mask=real)
    else:
        part = (sequence.to(tl.int64) * kv_heads + kv_head) * splits + split
        tl.store(parts + (part * rows + row[:, None]) * width + column[None, :], mean)
        tl.store(weights + part * rows + row, highest + tl.log(total))


@triton.jit
def _rounded(x):
    """Rounds float32 to the precision of bfloat16: to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _join_parts(
    parts, weights, output,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr,
    rows: tl.constexpr, width: tl.constexpr, splits: tl.constexpr,
):  # fmt: skip
    """weights: logarithms of what the parts of a sequence, means each, weigh; the first part has keys always."""
    sequence, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, column = tl.arange(0, rows), tl.arange(0, width)
    part = (sequence * kv_heads + kv_head) * splits
    highest = tl.load(weights + part * rows + row)
    total = tl.full([rows], 1.0, tl.float32)
    sums = tl.load(parts + (part * rows + row[:, None]) * width + column[None, :])
    for split in range(1, splits):
        weight = tl.load(weights + (part + split) * rows + row)
        mean = tl.load(parts + ((part + split) * rows + row[:, None]) * width + column[None, :])
        higher = tl.maximum(highest, weight)
        faded, share = tl.exp(highest - higher), tl.exp(weight - higher)
        sums = sums * faded[:, None] + mean * share[:, None]
        total = total * faded + share
        highest = higher
    head = kv_head * group + row
    places = (sequence * kv_heads * group + head[:, None]) * head_dim + column[None, :]
    real = (row < group)[:, None] & (column < head_dim)[None, :]
    tl.store(output + places, (sums / total[:, None]).to(output.dtype.element_ty), mask=real)
