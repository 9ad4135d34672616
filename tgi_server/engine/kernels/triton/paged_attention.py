"""Attention of query tokens over KV blocks in place, as Triton kernels: windowed, soft-capped, with alibi.

Neighbouring query tokens of one sequence form a tile; a sequence that decodes is a tile of one token.
A program takes one tile, one KV head with all query heads that share it, and a part of the tile's keys (`split_kv.py`).
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton import QueryTiles
from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier
from tgi_server.engine.kernels.triton.fp8 import decoded, unit
from tgi_server.engine.kernels.triton.split_kv import PartsPlan, join_parts, part_of

# Rows of a product that tensor cores compute; where fewer heads share their keys, the other rows are empty.
_FEWEST_ROWS = 16
# Programs of 128 rows that a multiprocessor needs to be busy until a pass is over.
_ENOUGH_PROGRAMS = 4
# Bytes of shared memory with which programs of 64 rows have two buffers each for keys and values of wide heads: these
# need 100.25 KiB. GPUs of compute capability 8.6, 8.9 and 12.0 have 99; there they have one each.
_BYTES_FOR_WIDE_HEADS = 101 << 10
# Softmax is computed in powers of 2, for which devices have an instruction: scores are multiplied by log2(e).
LOG2E = tl.constexpr(1.4426950408889634)
# Arguments whose values differ from pass to pass: kernels are not compiled anew for multiples of 16 and the like.
_PLANNED = ("tables", "firsts", "counts", "kv_lengths", "sequences", "tile_of", "starts", "places")
_ANY_VALUE = (*_PLANNED, "tiles", "window", "table_stride")


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The sizes that kernels are compiled for.

    rows: rows of a program's products, at least the tokens of a tile times the heads that share keys. width: at least
    the elements of a head. key_tile: keys that a program loads at once. stages: stages of the pipeline. With five,
    there are two buffers between reading the block table and reading keys and values, and two between this and
    computing.
    """

    rows: int
    width: int
    key_tile: int
    warps: int
    stages: int

    @classmethod
    def of(cls, group: int, head_dim: int, itemsize: int, tokens: int, shared: int) -> "LaunchShape":
        """group: query heads that share a KV head. tokens: most of a tile. shared: bytes of memory of a program."""
        rows = max(_FEWEST_ROWS, triton.next_power_of_2(group * tokens))
        width = max(16, triton.next_power_of_2(head_dim))
        if itemsize == 4:  # no tensor cores: products take longer than loads, and more registers
            return cls(rows, width, key_tile=32 if width <= 64 else 16, warps=8, stages=1)
        warps = 4 if rows * width <= 64 * 128 else 8
        stages = 4 if width > 128 and rows >= 64 and shared < _BYTES_FOR_WIDE_HEADS else 5
        return cls(rows, width, key_tile=32 if width > 128 else 64, warps=warps, stages=stages)


def tokens_of_a_tile(group: int, head_dim: int, itemsize: int, programs: float) -> int:
    """Returns how many prompt tokens a program attends for: as many as its registers hold, or half.

    programs: programs per multiprocessor, if each had 128 rows. If there are few, programs with 64 rows leave less of
    the device idle, and two or three of them on a multiprocessor compute while one waits.
    """
    if itemsize == 4:
        rows = 16 if head_dim > 64 else 32
    else:
        rows = 64 if head_dim > 128 or programs < _ENOUGH_PROGRAMS else 128
    return max(1, rows // group)


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
    output: Tensor,
    *,
    tokens: int,
    scaling: float,
    softcap: float,
    window: int,
    alibi_slopes: Tensor | None,
    rounded_alibi: bool,
    sinks: Tensor | None,
) -> None:
    """Writes the attention of the tokens of the tiles into output, contiguous, of query's shape.

    query: [tokens, heads, head_dim]; keys and values: [blocks, block_size, kv_heads, head_dim], contiguous. scales: of
    keys and of values. mantissa: bits of the numbers of those that are uint8, 0 where neither are. tables: [sequences,
    blocks] int32. plan: made with this window and the key tile of `shape`. tokens: most of a tile.
    """
    _, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = keys.shape
    group = heads // kv_heads
    parts = query.new_empty(plan.most_kept, kv_heads, shape.rows, shape.width, dtype=torch.float32)
    weights = query.new_empty(plan.most_kept, kv_heads, shape.rows, dtype=torch.float32)
    if query.stride(2) != 1:
        query = query.contiguous()
    score_scaling = scaling * scales[0] * unit(mantissa if keys.dtype == torch.uint8 else 0)
    # a capped score is a fraction of `softcap`, computed with a power of 2 as well
    score_scaling *= 2.0 * LOG2E.value / softcap if softcap else LOG2E.value
    _attend_part[len(plan.tile_of), kv_heads](
        query, keys, values, tables, tiles.first, tiles.counts, tiles.kv_lengths, tiles.sequences,
        plan.tile_of, plan.starts, plan.places,
        query if alibi_slopes is None else alibi_slopes,
        query if sinks is None else sinks,
        output, parts, weights, len(plan.places),
        query.stride(0), query.stride(1), tables.stride(0),
        scaling if rounded_alibi else 1.0, softcap * LOG2E.value, window, score_scaling, scales[1] * unit(mantissa),
        kv_heads=kv_heads, group=group, head_dim=head_dim, rows=shape.rows, width=shape.width,
        block_size=block_size, key_tile=shape.key_tile, windowed=window > 0, capped=softcap > 0,
        alibi=alibi_slopes is not None, rounded_alibi=rounded_alibi,
        sunk=sinks is not None, mantissa=mantissa, apart=shape.rows > _FEWEST_ROWS,
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(query.device),
    )  # fmt: skip
    join_parts(parts, weights, output, tiles, plan, group, tokens)


@triton.jit(do_not_specialize=_ANY_VALUE)
def _attend_part(
    query, keys, values, tables, firsts, counts, kv_lengths, sequences,
    tile_of, starts, places, slopes, sinks, output, parts, weights, tiles,
    query_stride, head_stride, table_stride, alibi_scaling, softcap, window, score_scaling, value_scale,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    block_size: tl.constexpr, key_tile: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr,
    alibi: tl.constexpr, rounded_alibi: tl.constexpr, sunk: tl.constexpr, mantissa: tl.constexpr,
    apart: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    """apart: key tiles that every row sees whole are computed first, without masks."""
    if pdl:
        wait_for_earlier()
    item, kv_head = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(starts + tiles):
        return
    tile = tl.load(tile_of + item)
    start, after = tl.load(starts + tile), tl.load(starts + tile + 1)
    count, length, first_token = tl.load(counts + tile), tl.load(kv_lengths + tile), tl.load(firsts + tile)
    table = tables + tl.load(sequences + tile).to(tl.int64) * table_stride
    first_key_tile = tl.maximum(length - count + 1 - window, 0) // key_tile if windowed else 0
    begin, end = part_of(item - start, after - start, first_key_tile, tl.cdiv(length, key_tile))

    row, column = tl.arange(0, rows), tl.arange(0, width)
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
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        highest = tl.where(item == start, sink, highest)
        total = tl.where(item == start, 1.0, total)

    # Key tiles from `inside` to before `outside` are seen whole by every row.
    inside, outside = begin, begin
    if apart:
        if windowed:
            inside = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(length - window, 0), key_tile), begin), end)
        outside = tl.maximum(tl.minimum((length - count + 1) // key_tile, end), inside)
        for key_tile_number in range(inside, outside):
            highest, total, sums = attend_key_tile(
                key_tile_number, q, highest, total, sums, keys, values, table, kv_head, length, own, slope,
                alibi_scaling, softcap, window, score_scaling, kv_heads, head_dim, width, block_size, key_tile,
                windowed, capped, alibi, rounded_alibi, mantissa, False,
            )  # fmt: skip
    before = inside - begin
    for number in tl.range(0, before + end - outside, num_stages=1 if apart else None):
        key_tile_number = begin + number
        if apart:
            key_tile_number = tl.where(number < before, key_tile_number, outside + number - before)
        highest, total, sums = attend_key_tile(
            key_tile_number, q, highest, total, sums, keys, values, table, kv_head, length, own, slope,
            alibi_scaling, softcap, window, score_scaling, kv_heads, head_dim, width, block_size, key_tile,
            windowed, capped, alibi, rounded_alibi, mantissa, True,
        )  # fmt: skip

    # a part without keys that a row sees has a total of 0 and weighs nothing
    mean = sums / tl.where(total > 0, total, 1.0)[:, None] * value_scale
    if after - start == 1:
        output_places = ((first_token + token).to(tl.int64) * kv_heads * group + head) * head_dim
        tl.store(output + output_places[:, None] + column[None, :], mean.to(output.dtype.element_ty), mask=real)
    else:
        part = (tl.load(places + tile) + item - start).to(tl.int64) * kv_heads + kv_head
        tl.store(parts + (part * rows + row[:, None]) * width + column[None, :], mean, mask=used[:, None])
        tl.store(weights + part * rows + row, highest + tl.log2(total), mask=used)


@triton.jit
def attend_key_tile(
    number, q, highest, total, sums, keys, values, table, kv_head, length, own, slope, alibi_scaling, softcap, window,
    score_scaling, kv_heads: tl.constexpr, head_dim: tl.constexpr, width: tl.constexpr, block_size: tl.constexpr,
    key_tile: tl.constexpr, windowed: tl.constexpr, capped: tl.constexpr, alibi: tl.constexpr,
    rounded_alibi: tl.constexpr, mantissa: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Returns highest, total and sums, updated with the keys of a tile."""
    column = tl.arange(0, width)
    position = number * key_tile + tl.arange(0, key_tile)
    held = column[None, :] < head_dim
    if masked:
        block = tl.load(table + position // block_size, mask=position < length, other=0)
        held = held & (position < length)[:, None]
    else:
        block = tl.load(table + position // block_size)
    slot = block.to(tl.int64) * block_size + position % block_size
    kv_places = (slot[:, None] * kv_heads + kv_head) * head_dim + column[None, :]
    k = tl.load(keys + kv_places, mask=held, other=0)
    if keys.dtype.element_ty == tl.uint8:
        k = decoded(k, mantissa).to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    scale = score_scaling
    if capped:
        # tanh, which Triton does not have
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * score_scaling) + 1.0))
        scale = 1.0
    if alibi:
        if rounded_alibi:
            bias = _rounded(slope[:, None] * _rounded(position.to(tl.float32))[None, :]) * alibi_scaling
        else:
            bias = slope[:, None] * position[None, :].to(tl.float32)
        scores = scores * scale + bias * LOG2E
        scale = 1.0
    if masked:
        seen = position[None, :] <= own[:, None]
        if windowed:
            seen = seen & (position[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    base = higher
    if masked:  # a row that has seen no key yet: minus infinity less minus infinity would be no number
        base = tl.where(higher == float("-inf"), 0.0, higher)
    faded = tl.exp2(highest - base)
    likelihood = tl.exp2(scores * scale - base[:, None])
    v = tl.load(values + kv_places, mask=held, other=0)
    if values.dtype.element_ty == tl.uint8:
        v = decoded(v, mantissa).to(q.dtype)
    sums = tl.dot(likelihood.to(v.dtype), v, sums * faded[:, None], input_precision="ieee")
    return higher, total * faded + tl.sum(likelihood, 1), sums


@triton.jit
def _rounded(x):
    """Rounds float32 to the precision of bfloat16, to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
