"""Attention of query tokens over the KV blocks where they lie, as Triton kernels: windowed, soft-capped, with alibi.

Query tokens of one sequence that stand next to each other form a tile; a sequence that decodes is a tile of one token.
A program takes one tile, one KV head with all query heads that share it, and a part of the tile's keys; a second kernel
puts the parts together ("flash decoding", Dao et al. 2023). Into how many parts each tile's keys are cut is planned on
the device, from the lengths of all sequences: a long one among many short ones is cut into as many as if it were alone.
So a CUDA graph holds for any lengths, and the host waits for none.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton import QueryTiles
from tgi_server.engine.kernels.triton.fp8 import decoded, unit

_PROGRAMS_PER_PROCESSOR = 2
# Rows of a product that tensor cores compute; where fewer heads share their keys, the other rows are empty.
_FEWEST_ROWS = 16
# Tiles that the planning program looks at together.
_PLANNED_AT_ONCE = 1024
# Arguments whose values differ from pass to pass: kernels are not compiled anew for multiples of 16 and the like.
_PLANNED = ("tables", "firsts", "counts", "kv_lengths", "sequences", "tile_of", "starts", "places", "share")
_ANY_VALUE = (*_PLANNED, "tiles", "target", "window", "table_stride")


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """The parts into which the keys of some tiles are cut, for layers with the same window.

    tile_of: [items] int32; the tile of each part, its parts one after the other. starts: [tiles + 1] int32; the first
    part of each tile, and behind them the number of all parts. places: [tiles] int32; where the results of a tile's
    parts are kept until they are put together. share: [1] int32; most key tiles of a part.
    most_kept: an upper bound of the results that are kept.
    """

    tile_of: Tensor
    starts: Tensor
    places: Tensor
    share: Tensor
    most_kept: int


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The sizes that kernels are compiled for.

    rows: of a program's products; tokens of a tile times the heads that share their keys, or more. width: elements of
    a head, or more. key_tile: keys that a program looks at together.
    """

    rows: int
    width: int
    key_tile: int
    warps: int
    stages: int

    @classmethod
    def of(cls, group: int, head_dim: int, itemsize: int, tokens: int) -> "LaunchShape":
        """group: query heads that share a KV head. tokens: most of a tile."""
        rows = max(_FEWEST_ROWS, triton.next_power_of_2(group * tokens))
        width = max(16, triton.next_power_of_2(head_dim))
        if itemsize == 4:  # no tensor cores: products take longer than loads, and more registers
            return cls(rows, width, key_tile=32 if width <= 64 else 16, warps=8, stages=1)
        large = width > 128
        warps = 4 if rows * width <= _FEWEST_ROWS * 128 else 8
        return cls(rows, width, key_tile=32 if large else 64, warps=warps, stages=2 if large else 3)


def tokens_of_a_tile(group: int, head_dim: int, itemsize: int) -> int:
    """Returns how many prompt tokens a program attends for: as many as its registers hold."""
    rows = (32 if itemsize == 4 else 128) // (2 if head_dim > 64 else 1)
    return max(1, rows // group)


def plan_parts(tiles: QueryTiles, kv_heads: int, key_tile: int, window: int) -> PartsPlan:
    """Plans the parts of all tiles so that the device has work for all its processors, and no part is too long."""
    count, device = len(tiles.counts), tiles.counts.device
    target = -(-_PROGRAMS_PER_PROCESSOR * _processors(device) // kv_heads)
    numbers = torch.empty(3 * count + target + 2, dtype=torch.int32, device=device)
    tile_of, starts, places, share = numbers.split((count + target, count + 1, count, 1))
    _plan[1,](
        tiles.counts, tiles.kv_lengths, tile_of, starts, places, share, count, target, window,
        key_tile=key_tile, windowed=window > 0, at_once=_PLANNED_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return PartsPlan(tile_of, starts, places, share, most_kept=2 * target)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    tiles: QueryTiles,
    plan: PartsPlan,
    shape: LaunchShape,
    scales: tuple[float, float],
    mantissa: int,
    *,
    scaling: float,
    softcap: float,
    window: int,
    alibi_slopes: Tensor | None,
    rounded_alibi: bool,
    sinks: Tensor | None,
) -> Tensor:
    """query: [tokens, heads, head_dim]; keys and values: [blocks, block_size, kv_heads, head_dim], contiguous.

    scales: of keys and of values. mantissa: bits of their numbers, 0 where these are not of 8 bits. tables:
    [sequences, blocks] int32. plan: made with this window and the key tile of `shape`. Returns a contiguous tensor of
    query's shape; what belongs to no tile is not written.
    """
    _, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = keys.shape
    group = heads // kv_heads
    output = query.new_empty(query.shape)
    parts = query.new_empty(plan.most_kept, kv_heads, shape.rows, shape.width, dtype=torch.float32)
    weights = query.new_empty(plan.most_kept, kv_heads, shape.rows, dtype=torch.float32)
    if query.stride(2) != 1:
        query = query.contiguous()
    sizes = {"kv_heads": kv_heads, "group": group, "head_dim": head_dim, "rows": shape.rows, "width": shape.width}
    _attend_part[len(plan.tile_of), kv_heads](
        query, keys, values, tables, tiles.first, tiles.counts, tiles.kv_lengths, tiles.sequences,
        plan.tile_of, plan.starts, plan.places, plan.share,
        query if alibi_slopes is None else alibi_slopes,
        query if sinks is None else sinks,
        output, parts, weights, len(plan.places),
        query.stride(0), query.stride(1), tables.stride(0), scaling, softcap, window,
        scaling * scales[0] * unit(mantissa), scales[1] * unit(mantissa),
        block_size=block_size, key_tile=shape.key_tile, windowed=window > 0, capped=softcap > 0,
        alibi=alibi_slopes is not None, rounded_alibi=rounded_alibi,
        sunk=sinks is not None, mantissa=mantissa,
        num_warps=shape.warps, num_stages=shape.stages, **sizes,
    )  # fmt: skip
    _join_parts[len(plan.places), kv_heads](
        parts, weights, output, tiles.first, tiles.counts, plan.starts, plan.places, num_warps=shape.warps, **sizes
    )
    return output


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _key_tiles(counts, kv_lengths, tile, tiles, window, key_tile: tl.constexpr, windowed: tl.constexpr):
    """Returns how many key tiles each of some query tiles looks at. A query tile without tokens looks at none."""
    count = tl.load(counts + tile, mask=tile < tiles, other=0)
    length = tl.load(kv_lengths + tile, mask=tile < tiles, other=0)
    first = tl.maximum(length - count + 1 - window, 0) // key_tile if windowed else 0
    return tl.where(count > 0, tl.cdiv(length, key_tile) - first, 0)


@triton.jit(do_not_specialize=_ANY_VALUE)
def _plan(
    counts, kv_lengths, tile_of, starts, places, share, tiles, target, window,
    key_tile: tl.constexpr, windowed: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([1], tl.int64)
    for first in range(0, tiles, at_once):
        tile = first + tl.arange(0, at_once)
        total += tl.sum(_key_tiles(counts, kv_lengths, tile, tiles, window, key_tile, windowed).to(tl.int64))
    longest = tl.maximum(tl.sum((total + target - 1) // target), 1).to(tl.int32)
    tl.store(share, longest)
    parts = tl.sum(tl.zeros([1], tl.int32))
    kept = tl.sum(tl.zeros([1], tl.int32))
    for first in range(0, tiles, at_once):
        tile = first + tl.arange(0, at_once)
        number = tl.cdiv(_key_tiles(counts, kv_lengths, tile, tiles, window, key_tile, windowed), longest)
        start = parts + tl.cumsum(number, 0) - number
        keeps = tl.where(number > 1, number, 0)
        tl.store(starts + tile, start, mask=tile < tiles)
        tl.store(places + tile, kept + tl.cumsum(keeps, 0) - keeps, mask=tile < tiles)
        for part in range(0, tl.max(number, 0)):
            tl.store(tile_of + start + part, tile, mask=part < number)
        parts += tl.sum(number, 0)
        kept += tl.sum(keeps, 0)
    tl.store(starts + tiles, parts)


@triton.jit(do_not_specialize=_ANY_VALUE)
def _attend_part(
    query, keys, values, tables, firsts, counts, kv_lengths, sequences,
    tile_of, starts, places, share, slopes, sinks, output, parts, weights, tiles,
    query_stride, head_stride, table_stride, scaling, softcap, window, score_scaling, value_scale,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    block_size: tl.constexpr, key_tile: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
    alibi: tl.constexpr, rounded_alibi: tl.constexpr, sunk: tl.constexpr, mantissa: tl.constexpr,
):  # fmt: skip
    item, kv_head = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(starts + tiles):
        return
    tile = tl.load(tile_of + item)
    start, after, longest = tl.load(starts + tile), tl.load(starts + tile + 1), tl.load(share)
    count, length, first_token = tl.load(counts + tile), tl.load(kv_lengths + tile), tl.load(firsts + tile)
    table = tables + tl.load(sequences + tile).to(tl.int64) * table_stride
    first_key_tile = tl.maximum(length - count + 1 - window, 0) // key_tile if windowed else 0
    begin = (first_key_tile + (item - start) * longest) * key_tile
    end = tl.minimum(begin + longest * key_tile, length)

    row, column, place = tl.arange(0, rows), tl.arange(0, width), tl.arange(0, key_tile)
    token, head = row // group, kv_head * group + row % group
    used = token < count
    real = used[:, None] & (column < head_dim)[None, :]
    own = length - count + token  # the position of each row's token
    # tokens times many heads exceed 32 bits
    query_places = (first_token + token).to(tl.int64)[:, None] * query_stride + head[:, None] * head_stride
    q = tl.load(query + query_places + column[None, :], mask=real, other=0.0)
    slope = tl.load(slopes + head, mask=used, other=0.0) if alibi else row

    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, width], tl.float32)
    if sunk:  # counted in one of a tile's parts
        highest = tl.where(item == start, tl.load(sinks + head, mask=used, other=0.0), highest)
        total = tl.where(item == start, 1.0, total)
    for tile_begin in range(begin, end, key_tile):
        position = tile_begin + place
        seen = position[None, :] <= own[:, None]
        if windowed:
            seen = seen & (position[None, :] > own[:, None] - window)
        block = tl.load(table + position // block_size, mask=position < length, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        kv_places = (slot[:, None] * kv_heads + kv_head) * head_dim + column[None, :]
        held = (position < length)[:, None] & (column < head_dim)[None, :]
        k = tl.load(keys + kv_places, mask=held, other=0)
        if mantissa:
            k = decoded(k, mantissa).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * score_scaling
        if capped:
            # tanh, of which Triton has none of its own
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        if alibi:
            if rounded_alibi:
                bias = slope[:, None] * _rounded(position.to(tl.float32))[None, :]
                scores += _rounded(bias) * scaling
            else:
                scores += slope[:, None] * position[None, :].to(tl.float32)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        # a row that has seen no key yet: minus infinity less minus infinity would be no number
        base = tl.where(higher == float("-inf"), 0.0, higher)
        faded = tl.exp(highest - base)
        likelihood = tl.exp(scores - base[:, None])
        v = tl.load(values + kv_places, mask=held, other=0)
        if mantissa:
            v = decoded(v, mantissa).to(q.dtype)
        sums = sums * faded[:, None] + tl.dot(likelihood.to(v.dtype), v, input_precision="ieee")
        total = total * faded + tl.sum(likelihood, 1)
        highest = higher

    # a part without keys that a row sees has a total of 0 and weighs nothing
    mean = sums / tl.where(total > 0, total, 1.0)[:, None] * value_scale
    if after - start == 1:
        output_places = ((first_token + token).to(tl.int64) * kv_heads * group + head) * head_dim
        tl.store(output + output_places[:, None] + column[None, :], mean.to(output.dtype.element_ty), mask=real)
    else:
        part = (tl.load(places + tile) + item - start).to(tl.int64) * kv_heads + kv_head
        tl.store(parts + (part * rows + row[:, None]) * width + column[None, :], mean)
        tl.store(weights + part * rows + row, highest + tl.log(total))


@triton.jit
def _rounded(x):
    """float32 with the precision of bfloat16, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=_ANY_VALUE)
def _join_parts(
    parts, weights, output, firsts, counts, starts, places,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """weights: logarithms of what the parts of a tile, means each, weigh. A row may have no keys in some of them."""
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    number = tl.load(starts + tile + 1) - tl.load(starts + tile)
    if number < 2:
        return
    row, column = tl.arange(0, rows), tl.arange(0, width)
    part = tl.load(places + tile).to(tl.int64) * kv_heads + kv_head
    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, width], tl.float32)
    for _ in range(0, number):
        weight = tl.load(weights + part * rows + row)
        mean = tl.load(parts + (part * rows + row[:, None]) * width + column[None, :])
        higher = tl.maximum(highest, weight)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        faded, share = tl.exp(highest - base), tl.exp(weight - base)
        sums = sums * faded[:, None] + mean * share[:, None]
        total = total * faded + share
        highest = higher
        part += kv_heads
    token, head = row // group, kv_head * group + row % group
    output_places = ((tl.load(firsts + tile) + token).to(tl.int64) * kv_heads * group + head) * head_dim
    real = (token < tl.load(counts + tile))[:, None] & (column < head_dim)[None, :]
    joined = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(output + output_places[:, None] + column[None, :], joined.to(output.dtype.element_ty), mask=real)
