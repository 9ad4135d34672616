"""Multi-head latent attention in two Triton kernels: one writes a token's entry into the cache, the other attends for
sequences that decode.

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
from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier
from tgi_server.engine.kernels.triton.norm_and_gate import normalised, warps_of
from tgi_server.engine.kernels.triton.rope_and_cache import turned_pairs
from tgi_server.engine.kernels.triton.split_kv import PartsPlan, join_parts, part_of

_LOG2E = 1.4426950408889634
_PLANNED = ("tables", "firsts", "counts", "kv_lengths", "sequences", "tile_of", "starts", "places")


# Bytes of shared memory that GPUs have on which programs of 64 rows fit: these need 112 KiB on compute capability 8.0,
# 144 on 9.0, and 208 on 10.0.
_BYTES_FOR_64_ROWS = 160 << 10


class LatentShape(NamedTuple):
    """The sizes that the kernel is compiled for.

    group: heads of a program, as many as divide all. rows: rows of its products, at least as many; with 64 each latent
    is read for four times as many heads as with 16. key_tile: keys that it loads at once. stages: pipeline stages.
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


class LatentNorm(NamedTuple):
    """A root mean square norm of queries, or of latents. weight: [size]."""

    weight: Tensor
    eps: float


def write_latents(
    joined: Tensor,
    of_queries: LatentNorm | None,
    of_keys: LatentNorm,
    rotation: tuple[Tensor, Tensor] | None,
    latents: Tensor,
    beside: Tensor,
    slots: Tensor,
    rotated: int,
    *,
    interleaved: bool,
) -> Tensor:
    """Puts normalised latents and turned parts into their slots, [tokens] int64. Returns the normalised queries.

    joined: [tokens, queries + rank + rotated], contiguous. of_queries: None: queries are not normalised, nor returned.
    rotation: cosine and sine, [tokens, rotated] each, contiguous; None: nothing is turned. latents, beside: as
    `attend_latents` takes them. interleaved: as in `rope_and_cache.turn`.
    """
    tokens, rank = len(joined), latents.shape[3]
    size = joined.shape[1] - rank - rotated
    queries = joined.new_empty(tokens, size if of_queries else 0)
    cosine, sine = rotation or (joined, joined)
    widest = triton.next_power_of_2(max(rank, size if of_queries else 0))
    _write_latents[tokens, 2 if of_queries else 1](
        joined, *(of_queries or (None, 0.0)), *of_keys, cosine, sine, latents, beside, slots, queries,
        size=size, rank=rank, rotated=rotated, turns=rotation is not None, stride=beside.shape[3],
        size_width=triton.next_power_of_2(max(1, size)), rank_width=triton.next_power_of_2(rank),
        rotated_width=triton.next_power_of_2(max(1, rotated)), interleaved=interleaved, num_warps=warps_of(widest),
        **launch_options(joined.device),
    )  # fmt: skip
    return queries


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
    rotation: tuple[Tensor, Tensor] | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """Returns the means of the latents that the tokens of tiles, one each, attend to: [tokens, heads, rank].

    query: [tokens, heads, rank], of latents. turned: [tokens, heads, size], of the rotated parts. rotation: turns
    these, as in `write_latents`; None: they are turned. latents: [blocks, block_size, 1, rank], contiguous. beside:
    [blocks, block_size, 1, any], contiguous; a rotated part comes first. tables: [sequences, blocks] int32. plan: made
    with the heads' groups as KV heads, and the key tile of `shape`.
    """
    tokens, heads, rank = query.shape
    query, turned = (each if each.stride(2) == 1 else each.contiguous() for each in (query, turned))
    cosine, sine = rotation or (turned, turned)
    count, width = heads // shape.group, max(16, triton.next_power_of_2(rank))
    output = query.new_empty(tokens, heads, rank)
    parts = query.new_empty(plan.most_kept, count, shape.rows, width, dtype=torch.float32)
    weights = query.new_empty(plan.most_kept, count, shape.rows, dtype=torch.float32)
    _attend_latents[len(plan.tile_of), count](
        query, turned, cosine, sine, latents, beside, tables,
        tiles.first, tiles.counts, tiles.kv_lengths, tiles.sequences,
        plan.tile_of, plan.starts, plan.places, output, parts, weights, len(plan.places),
        tables.stride(0), query.stride(0), query.stride(1), turned.stride(0), turned.stride(1), scaling * _LOG2E,
        turns=rotation is not None, interleaved=interleaved, heads=heads, group=shape.group, rank=rank,
        size=turned.shape[2], stride=beside.shape[3], rows=shape.rows,
        width=width, size_width=max(16, triton.next_power_of_2(turned.shape[2])), block_size=latents.shape[1],
        key_tile=shape.key_tile, num_warps=shape.warps, num_stages=shape.stages, **launch_options(query.device),
    )  # fmt: skip
    join_parts(parts, weights, output, tiles, plan, shape.group, 1)
    return output


@triton.jit
def _write_latents(
    joined, query_weight, query_eps, key_weight, key_eps, cosine, sine, latents, beside, slots, queries,
    size: tl.constexpr, rank: tl.constexpr, rotated: tl.constexpr, turns: tl.constexpr, stride: tl.constexpr,
    size_width: tl.constexpr, rank_width: tl.constexpr, rotated_width: tl.constexpr, interleaved: tl.constexpr,
    pdl: tl.constexpr = False,
):  # fmt: skip
    """A token has a program for what is cached, and one for its query if that is normalised."""
    if pdl:
        wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    row = joined + token * (size + rank + rotated)
    kind: tl.constexpr = joined.dtype.element_ty
    if tl.program_id(1) == 0:
        slot, column = tl.load(slots + token), tl.arange(0, rank_width)
        values = tl.load(row + size + column, mask=column < rank, other=0.0).to(tl.float32)
        values = normalised(values, key_weight, None, key_eps, column, rank, False, kind)
        tl.store(latents + slot * rank + column, values.to(kind), mask=column < rank)
        place, only = tl.arange(0, rotated_width)[None, :], tl.zeros([1, 1], tl.int32)
        held = place < rotated
        turned = turned_pairs(
            row + size + rank + only, cosine, sine, token, place, held, rotated if turns else 0, interleaved
        )
        tl.store(beside + slot * stride + place, turned, mask=held)
    elif query_weight is not None:
        of_query = tl.arange(0, size_width)
        query = tl.load(row + of_query, mask=of_query < size, other=0.0).to(tl.float32)
        query = normalised(query, query_weight, None, query_eps, of_query, size, False, kind)
        tl.store(queries + token * size + of_query, query.to(kind), mask=of_query < size)


@triton.jit(do_not_specialize=[*_PLANNED, "tiles", "table_stride"])
def _attend_latents(
    query, turned, cosine, sine, latents, beside, tables, firsts, counts, kv_lengths, sequences, tile_of, starts,
    places, output, parts, weights, tiles, table_stride, query_token, query_head, turned_token, turned_head,
    score_scaling, turns: tl.constexpr, interleaved: tl.constexpr,
    heads: tl.constexpr, group: tl.constexpr, rank: tl.constexpr, size: tl.constexpr, stride: tl.constexpr,
    rows: tl.constexpr, width: tl.constexpr, size_width: tl.constexpr, block_size: tl.constexpr,
    key_tile: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    if pdl:
        wait_for_earlier()
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
    at, head = token.to(tl.int64), (part_of_heads * group + row)[:, None]
    query_row = at * heads + head
    real = used[:, None] & held[None, :]
    q = tl.load(query + at * query_token + head * query_head + column[None, :], mask=real, other=0.0)
    t = turned_pairs(
        turned + at * turned_token + head * turned_head, cosine, sine, at, place[None, :],
        used[:, None] & of_turned[None, :], size if turns else 0, interleaved,
    )  # fmt: skip

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
        tl.store(output + query_row * rank + column[None, :], mean.to(output.dtype.element_ty), mask=real)
    else:
        part = (tl.load(places + tile) + item - start).to(tl.int64) * (heads // group) + part_of_heads
        tl.store(parts + (part * rows + row[:, None]) * width + column[None, :], mean, mask=used[:, None])
        tl.store(weights + part * rows + row, highest + tl.log2(total), mask=used)
