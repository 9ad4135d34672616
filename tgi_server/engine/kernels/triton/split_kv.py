"""Split-KV ("flash decoding", Dao et al. 2023): the keys of a query tile are cut into parts, and their results joined.

The number of parts of each tile is planned on the device, from the lengths of all sequences: a long sequence among many
short ones is cut into as many parts as if it were alone. So a CUDA graph is right for any lengths, and the host never
waits for them.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton import QueryTiles, multiprocessors
from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier

PROGRAMS_PER_PROCESSOR = 2
# Maximum number of parts of a tile, so that one pass joins them; minimum number of key tiles of one of several parts.
MOST_PARTS = 64
_FEWEST_KEY_TILES = 2
# The minimum for prompts, whose parts have more rows to join.
_FEWEST_KEY_TILES_OF_PROMPTS = 16
# Tiles that the planning program looks at together.
_PLANNED_AT_ONCE = 1024
# Numbers of parts that a joining program loads at once: for tiles of few rows, those of `MOST_PARTS` rows of 128
# elements; those of prompts seldom have more than two parts.
_JOINED_AT_ONCE = 8192
_JOINED_AT_ONCE_OF_PROMPTS = 2048
_ANY_VALUE = ("counts", "kv_lengths", "firsts", "tile_of", "starts", "places", "joined", "tiles", "target")


@dataclass(frozen=True, slots=True)
class PartsPlan:
    """The parts into which the keys of some tiles are cut, for layers with the same window.

    tile_of: [items] int32; the tile of each part, with the parts of a tile next to each other. starts: [tiles + 1]
    int32; the first part of each tile, and at the end the number of all parts. places: [tiles] int32; where the results
    of a tile's parts are stored until they are joined. joined: [n + 1] int32; the tiles that have several parts, at
    most n, and in the last element their number. most_kept: an upper bound of the stored results.
    """

    tile_of: Tensor
    starts: Tensor
    places: Tensor
    joined: Tensor
    most_kept: int


def plan_parts(tiles: QueryTiles, kv_heads: int, key_tile: int, window: int, rows: int = 16) -> PartsPlan:
    """Plans the parts of all tiles so that all multiprocessors have work, and no part is too long.

    rows: rows of a program's products.
    """
    count, device = len(tiles.counts), tiles.counts.device
    target = -(-PROGRAMS_PER_PROCESSOR * multiprocessors(device) // kv_heads)
    most_joined = min(count, target)  # each of these has more key tiles than one part of `target` would
    sizes = (count + target, count + 1, count, most_joined + 1)
    numbers = torch.empty(sum(sizes), dtype=torch.int32, device=device)
    tile_of, starts, places, joined = numbers.split(sizes)
    _plan[1,](
        tiles.counts, tiles.kv_lengths, tile_of, starts, places, joined, count, target, window, most_joined,
        key_tile=key_tile, windowed=window > 0, most_parts=MOST_PARTS,
        fewest_key_tiles=_FEWEST_KEY_TILES if rows <= 16 else _FEWEST_KEY_TILES_OF_PROMPTS,
        at_once=_PLANNED_AT_ONCE, num_warps=8, **launch_options(device),
    )  # fmt: skip
    return PartsPlan(tile_of, starts, places, joined, most_kept=2 * target)


def join_parts(
    parts: Tensor, weights: Tensor, output: Tensor, tiles: QueryTiles, plan: PartsPlan, group: int, tokens: int
) -> None:
    """Writes the rows of the tiles that have several parts to output, [tokens, heads, head_dim].

    parts: [kept, kv_heads, rows, width] float32; the weighted mean of each part's values. weights: [kept, kv_heads,
    rows] float32; the logarithms, to the base of 2, of each part's total weight. group: query heads that share a KV
    head. tokens: maximum number of tokens of a tile.
    """
    _, kv_heads, rows, width = parts.shape
    together, at_once = joined_at_once(rows, width)
    sizes = {"group": group, "head_dim": output.shape[2], "rows": rows, "width": width, "together": together}
    _join_parts[len(plan.joined) - 1, triton.cdiv(group * tokens, together), kv_heads](
        parts, weights, output, tiles.first, tiles.counts, plan.starts, plan.places, plan.joined, len(plan.joined) - 1,
        kv_heads=kv_heads, most_parts=MOST_PARTS, at_once=at_once, num_warps=4, **sizes,
        **launch_options(output.device),
    )  # fmt: skip


def joined_at_once(rows: int, width: int) -> tuple[int, int]:
    """Returns how many rows a joining program has, and how many parts of them it loads at once."""
    together = max(1, rows // 16)
    numbers = _JOINED_AT_ONCE if together == 1 else _JOINED_AT_ONCE_OF_PROMPTS
    return together, parts_at_once(together, width, numbers)


def parts_at_once(together: int, width: int, numbers: int = _JOINED_AT_ONCE) -> int:
    """Returns how many parts of some rows a joining program loads at once. numbers: how many numbers have room."""
    return max(1, min(MOST_PARTS, numbers // (together * width)))


@triton.jit
def _key_tiles(counts, kv_lengths, tile, tiles, window, key_tile: tl.constexpr, windowed: tl.constexpr):
    """Returns how many key tiles each of some query tiles attends to; none for a query tile without tokens."""
    count = tl.load(counts + tile, mask=tile < tiles, other=0)
    length = tl.load(kv_lengths + tile, mask=tile < tiles, other=0)
    first = tl.maximum(length - count + 1 - window, 0) // key_tile if windowed else 0
    return tl.where(count > 0, tl.cdiv(length, key_tile) - first, 0)


@triton.jit
def part_of(part, parts, first, after):
    """Returns the first key tile of a part, and the one after its last: parts differ by one tile at most."""
    tiles = after - first
    return first + part * tiles // parts, first + (part + 1) * tiles // parts


@triton.jit(do_not_specialize=[*_ANY_VALUE, "window", "most_joined"])
def _plan(
    counts, kv_lengths, tile_of, starts, places, joined, tiles, target, window, most_joined,
    key_tile: tl.constexpr, windowed: tl.constexpr, most_parts: tl.constexpr, fewest_key_tiles: tl.constexpr,
    at_once: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    if pdl:
        wait_for_earlier()
    total = tl.zeros([1], tl.int64)
    longest = tl.full([1], 1, tl.int32)
    for first in range(0, tiles, at_once):
        tile = first + tl.arange(0, at_once)
        number = _key_tiles(counts, kv_lengths, tile, tiles, window, key_tile, windowed)
        total += tl.sum(number.to(tl.int64))
        longest = tl.maximum(longest, tl.max(number, 0))
    fewest = tl.maximum(tl.cdiv(longest, most_parts), fewest_key_tiles)
    most = tl.max(tl.maximum(((total + target - 1) // target).to(tl.int32), fewest))
    parts = tl.sum(tl.zeros([1], tl.int32))
    kept = tl.sum(tl.zeros([1], tl.int32))
    several = tl.sum(tl.zeros([1], tl.int32))
    for first in range(0, tiles, at_once):
        tile = first + tl.arange(0, at_once)
        number = tl.cdiv(_key_tiles(counts, kv_lengths, tile, tiles, window, key_tile, windowed), most)
        start = parts + tl.cumsum(number, 0) - number
        keeps = tl.where(number > 1, number, 0)
        cut = (number > 1).to(tl.int32)
        tl.store(starts + tile, start, mask=tile < tiles)
        tl.store(places + tile, kept + tl.cumsum(keeps, 0) - keeps, mask=tile < tiles)
        tl.store(joined + several + tl.cumsum(cut, 0) - cut, tile, mask=number > 1)
        for part in range(0, tl.max(number, 0)):
            tl.store(tile_of + start + part, tile, mask=part < number)
        parts += tl.sum(number, 0)
        kept += tl.sum(keeps, 0)
        several += tl.sum(cut, 0)
    tl.store(starts + tiles, parts)
    tl.store(joined + most_joined, several)


@triton.jit(do_not_specialize=[*_ANY_VALUE[:-2], "most_joined"])
def _join_parts(
    parts, weights, output, firsts, counts, starts, places, joined, most_joined,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    together: tl.constexpr, most_parts: tl.constexpr, at_once: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    """A program has some rows of one KV head of one tile. A row may have no keys in some of the parts."""
    if pdl:
        wait_for_earlier()
    if tl.program_id(0) >= tl.load(joined + most_joined):
        return
    tile, kv_head = tl.load(joined + tl.program_id(0)), tl.program_id(2)
    number = tl.load(starts + tile + 1) - tl.load(starts + tile)
    row, column = tl.program_id(1) * together + tl.arange(0, together), tl.arange(0, width)
    token, head = row // group, kv_head * group + row % group
    used = token < tl.load(counts + tile)
    first = tl.load(places + tile)

    mean = joined_parts(
        parts, weights, first, number, kv_head, row, used, kv_heads, rows, width, together, most_parts, at_once
    )
    output_places = ((tl.load(firsts + tile) + token).to(tl.int64) * kv_heads * group + head) * head_dim
    real = used[:, None] & (column < head_dim)[None, :]
    tl.store(output + output_places[:, None] + column[None, :], mean.to(output.dtype.element_ty), mask=real)


@triton.jit
def joined_parts(
    parts, weights, first, number, kv_head, row, used, kv_heads: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
    together: tl.constexpr, most_parts: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """Joins the parts of some rows: returns the weighted mean of their values, [together, width].

    first, number: the first part and the number of parts. Other programs may just have written them, so they are not
    read from the L1 cache.
    """
    column = tl.arange(0, width)
    every = tl.arange(0, most_parts)
    weight = tl.load(
        weights + ((first + every).to(tl.int64) * kv_heads + kv_head)[:, None] * rows + row[None, :],
        mask=(every < number)[:, None] & used[None, :],
        other=float("-inf"),
        cache_modifier=".cg",
    )
    highest = tl.max(weight, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2(weight - base[None, :]), 0)
    sums = tl.zeros([together, width], tl.float32)
    for start in range(0, most_parts if at_once == most_parts else number, at_once):
        part = start + tl.arange(0, at_once)
        place = ((first + part).to(tl.int64) * kv_heads + kv_head)[:, None] * rows + row[None, :]
        real = (part < number)[:, None] & used[None, :]
        share = tl.exp2(tl.load(weights + place, mask=real, other=float("-inf"), cache_modifier=".cg") - base[None, :])
        places = parts + place[:, :, None] * width + column[None, None, :]
        mean = tl.load(places, mask=real[:, :, None], other=0.0, cache_modifier=".cg")
        sums += tl.sum(mean * share[:, :, None], 0)
    return sums / tl.where(total > 0, total, 1.0)[:, None]
