"""Attention of sequences that decode over latents (multi-head latent attention), as a Triton kernel.

All heads share the latents: a program takes one token, some of its heads, and a part of its keys (`split_kv.py`). It
reads each latent once, as the key and as the value.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton import QueryTiles, shared_memory
from tgi_server.engine.kernels.triton.split_kv import PartsPlan, join_parts, part_of

_LOG2E = 1.4426950408889634
_PLANNED = ("tables", "firsts", "counts", "kv_lengths", "sequences", "tile_of", "starts", "places")


# Bytes of shared memory that GPUs have on which programs of 64 rows fit: these need 112 KiB on compute capability 8.0,
# 144 on 9.0, and 208 on 10.0.
_BYTES_FOR_64_ROWS = 160 << 10


class LatentShape(NamedTuple):
    """The sizes that the kernel is compiled for.

    group: heads of a program, the most that divide all. rows: of its products, at least as many; with 64 each latent is
    read for four times as many heads as with 16. key_tile: keys that it looks at together. stages: of its pipeline.
    """

    group: int
    rows: int
    key_tile: int
    warps: int
    stages: int

    @classmethod
    def of(cls, heads: int, itemsize: int, device: torch.device) -> Self:
        if itemsize == 2 and heads % 64 == 0 and shared_memory(device) >= _BYTES_FOR_64_ROWS:
            return cls(64, rows=64, key_tile=32, warps=8, stages=2)
        group = max(count for count in range(1, 17) if heads % count == 0)
        return cls(group, 16, *((16, 8, 1) if itemsize == 4 else (32, 4, 5)))


def attend_latents(
    query: Tensor,
    turned: Tensor,
    latents: Tensor,
    beside: Tensor,
    tables: Tensor,
    tiles: QueryTiles,
    plan: PartsPlan,
    shape: LatentShape,
    scaling: float,
) -> Tensor:
    """Returns the means of the latents that the tokens of tiles, one each, attend to: [tokens, heads, rank].

    query: [tokens, heads, rank], of latents. turned: [tokens, heads, size], of the rotated parts. latents: [blocks,
    block_size, 1, rank], contiguous. beside: [blocks, block_size, 1, any], contiguous; a rotated part comes first.
    tables: [sequences, blocks] int32. plan: made with the heads' groups as KV heads, and the key tile of `shape`.
    """
    tokens, heads, rank = query.shape
    count, width = heads // shape.group, max(16, triton.next_power_of_2(rank))
    output = query.new_empty(tokens, heads, rank)
    parts = query.new_empty(plan.most_kept, count, shape.rows, width, dtype=torch.float32)
    weights = query.new_empty(plan.most_kept, count, shape.rows, dtype=torch.float32)
    _attend_latents[len(plan.tile_of), count](
        query.contiguous(), turned.contiguous(), latents, beside, tables,
        tiles.first, tiles.counts, tiles.kv_lengths, tiles.sequences,
        plan.tile_of, plan.starts, plan.places, output, parts, weights, len(plan.places),
        tables.stride(0), scaling * _LOG2E,
        heads=heads, group=shape.group, rank=rank, size=turned.shape[2], stride=beside.shape[3], rows=shape.rows,
        width=width, size_width=max(16, triton.next_power_of_2(turned.shape[2])), block_size=latents.shape[1],
        key_tile=shape.key_tile, num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    join_parts(parts, weights, output, tiles, plan, shape.group, 1)
    return output


@triton.jit(do_not_specialize=[*_PLANNED, "tiles", "table_stride"])
def _attend_latents(
    query, turned, latents, beside, tables, firsts, counts, kv_lengths, sequences, tile_of, starts, places,
    output, parts, weights, tiles, table_stride, score_scaling,
    heads: tl.constexpr, group: tl.constexpr, rank: tl.constexpr, size: tl.constexpr, stride: tl.constexpr,
    rows: tl.constexpr, width: tl.constexpr, size_width: tl.constexpr, block_size: tl.constexpr,
    key_tile: tl.constexpr,
):  # fmt: skip
    item, part_of_heads = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(starts + tiles):
        return
    tile = tl.load(tile_of + item)
    start, after = tl.load(starts + tile), tl.load(starts + tile + 1)
    length, token = tl.load(kv_lengths + tile), tl.load(firsts + tile)
    table = tables + tl.load(sequences + tile).to(tl.int64) * table_stride
    begin, end = part_of(item - start, after - start, 0, tl.cdiv(length, key_tile))

    row, column, place = tl.arange(0, rows), tl.arange(0, width), tl.arange(0, size_width)
    used, held, of_turned = row < group, column < rank, place < size
    query_row = token.to(tl.int64) * heads + part_of_heads * group + row
    real = used[:, None] & held[None, :]
    q = tl.load(query + query_row[:, None] * rank + column[None, :], mask=real, other=0.0)
    t = tl.load(turned + query_row[:, None] * size + place[None, :], mask=used[:, None] & of_turned[None, :], other=0.0)

    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, width], tl.float32)
    for number in range(begin, end):
        position = number * key_tile + tl.arange(0, key_tile)
        there = position < length
        block = tl.load(table + position // block_size, mask=there, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        latent = tl.load(
            latents + slot[:, None] * rank + column[None, :], mask=there[:, None] & held[None, :], other=0.0
        )
        rotated = tl.load(
            beside + slot[:, None] * stride + place[None, :], mask=there[:, None] & of_turned[None, :], other=0.0
        )
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(t, tl.trans(rotated), scores, input_precision="ieee") * score_scaling
        scores = tl.where(there[None, :], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        faded = tl.exp2(highest - higher)
        likelihood = tl.exp2(scores - higher[:, None])
        sums = tl.dot(likelihood.to(latent.dtype), latent, sums * faded[:, None], input_precision="ieee")
        total = total * faded + tl.sum(likelihood, 1)
        highest = higher

    mean = sums / total[:, None]
    if after - start == 1:
        tl.store(output + query_row[:, None] * rank + column[None, :], mean.to(output.dtype.element_ty), mask=real)
    else:
        part = (tl.load(places + tile) + item - start).to(tl.int64) * (heads // group) + part_of_heads
        tl.store(parts + (part * rows + row[:, None]) * width + column[None, :], mean, mask=used[:, None])
        tl.store(weights + part * rows + row, highest + tl.log2(total), mask=used)
