"""Attention of sequences that decode, one token each, in one Triton kernel: it rotates query and key, writes key and
value into their slot, attends over the blocks, and joins the parts that keys are cut into.

A program takes one sequence, one KV head with all query heads that share it, and a part of the keys (`split_kv.py`).
The program of the last part writes the token's own key. The program that finishes last joins the parts.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton import multiprocessors, shared_memory
from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier
from tgi_server.engine.kernels.triton.fp8 import unit
from tgi_server.engine.kernels.triton.paged_attention import LOG2E, LaunchShape, attend_key_tile
from tgi_server.engine.kernels.triton.rope_and_cache import kept, turned_pairs
from tgi_server.engine.kernels.triton.split_kv import (
    MOST_PARTS,
    PROGRAMS_PER_PROCESSOR,
    PartsPlan,
    joined_parts,
    part_of,
    parts_at_once,
)

_ANY_VALUE = ("slots", "tables", "kv_lengths", "tile_of", "starts", "places", "rows_of_pass", "window", "table_stride")
_STRIDES = ("query_stride", "key_stride", "value_stride", "head_stride", "key_head_stride", "value_head_stride")


def arrivals(device: torch.device, kv_heads: int) -> Tensor:
    """Returns zeros, in which `attend_in_one` counts finished parts; every pass leaves zeros again.

    kv_heads: maximum number of KV heads of a layer.
    """
    most = 2 * (PROGRAMS_PER_PROCESSOR * multiprocessors(device) + kv_heads)  # results that any plan keeps, by KV heads
    return torch.zeros(most, dtype=torch.int32, device=device)


def attend_in_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    tables: Tensor,
    kv_lengths: Tensor,
    plan: PartsPlan,
    scales: tuple[float, float],
    mantissa: int,
    arrived: Tensor,
    *,
    scaling: float,
    softcap: float,
    window: int,
    alibi_slopes: Tensor | None,
    rounded_alibi: bool,
    sinks: Tensor | None,
) -> Tensor:
    """Writes each row's key and value into its slot. Returns attention, [rows, heads, head_dim], contiguous.

    query: [rows, heads, head_dim]. key, value: [rows, kv_heads, head_dim]. rotation: cosine and sine, [rows, rotated]
    each; pairs stand half of `rotated` apart; None: nothing is turned. keys, values: [blocks, block_size, kv_heads,
    head_dim], contiguous. slots: [rows] int64. tables: [rows, blocks] int32. kv_lengths: [rows] int32, the own key
    included. plan: the plan with a tile for each row. arrived: see `arrivals`. Others: see `paged_attention`.
    """
    rows, heads, head_dim = query.shape
    _, block_size, kv_heads, _ = keys.shape
    group = heads // kv_heads
    shape = LaunchShape.of(group, head_dim, query.element_size(), 1, shared_memory(query.device))
    query, key, value = (each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value))
    cosine, sine = (key, key) if rotation is None else (table.contiguous() for table in rotation)
    output = query.new_empty(rows, heads, head_dim)
    together = min(shape.rows, triton.next_power_of_2(group))
    parts = query.new_empty(plan.most_kept, kv_heads, together, shape.width, dtype=torch.float32)
    weights = query.new_empty(plan.most_kept, kv_heads, together, dtype=torch.float32)
    score_scaling = scaling * scales[0] * unit(mantissa if keys.dtype == torch.uint8 else 0)
    score_scaling *= 2.0 * LOG2E.value / softcap if softcap else LOG2E.value
    _attend_in_one[len(plan.tile_of), kv_heads](
        query, key, value, cosine, sine, keys, values, slots, tables, kv_lengths,
        plan.tile_of, plan.starts, plan.places, arrived,
        query if alibi_slopes is None else alibi_slopes, query if sinks is None else sinks,
        output, parts, weights, rows,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        tables.stride(0), *scales,
        scaling if rounded_alibi else 1.0, softcap * LOG2E.value, window, score_scaling,
        scales[1] * unit(mantissa),
        kv_heads=kv_heads, group=group, head_dim=head_dim, rotated=0 if rotation is None else cosine.shape[1],
        rows=shape.rows, together=together, width=shape.width, block_size=block_size, key_tile=shape.key_tile,
        windowed=window > 0, capped=softcap > 0, alibi=alibi_slopes is not None, rounded_alibi=rounded_alibi,
        sunk=sinks is not None, mantissa=mantissa,
        most_parts=MOST_PARTS, at_once=parts_at_once(together, shape.width),
        num_warps=shape.warps, num_stages=shape.stages, **launch_options(query.device),
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=_ANY_VALUE)
def _attend_in_one(
    query, key, value, cosine, sine, keys, values, slots, tables, kv_lengths, tile_of, starts, places, arrived,
    slopes, sinks, output, parts, weights, rows_of_pass,
    query_stride, head_stride, key_stride, key_head_stride, value_stride, value_head_stride, table_stride,
    key_kept_scale, value_kept_scale, alibi_scaling, softcap, window, score_scaling, value_scale,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, rotated: tl.constexpr,
    rows: tl.constexpr, together: tl.constexpr, width: tl.constexpr, block_size: tl.constexpr, key_tile: tl.constexpr,
    windowed: tl.constexpr, capped: tl.constexpr, alibi: tl.constexpr, rounded_alibi: tl.constexpr,
    sunk: tl.constexpr, mantissa: tl.constexpr, most_parts: tl.constexpr, at_once: tl.constexpr,
    pdl: tl.constexpr = False,
):  # fmt: skip
    """rows: rows of a program's products. The first are a group's heads, of which `together` are kept."""
    if pdl:
        wait_for_earlier()
    item, kv_head = tl.program_id(0), tl.program_id(1)
    if item >= tl.load(starts + rows_of_pass):
        return
    token = tl.load(tile_of + item)
    start, after = tl.load(starts + token), tl.load(starts + token + 1)
    length, place, slot = tl.load(kv_lengths + token), tl.load(places + token), tl.load(slots + token)
    table = tables + token.to(tl.int64) * table_stride
    first_key_tile = tl.maximum(length - window, 0) // key_tile if windowed else 0
    begin, end = part_of(item - start, after - start, first_key_tile, tl.cdiv(length, key_tile))

    row, column = tl.arange(0, rows), tl.arange(0, width)
    head = kv_head * group + row % group
    used, own = row < group, tl.zeros([rows], tl.int32) + length - 1
    at = token.to(tl.int64)
    own_query = query + at * query_stride + head[:, None] * head_stride
    held = column[None, :] < head_dim
    q = turned_pairs(own_query, cosine, sine, at, column[None, :], held, rotated, False)
    if item == after - 1:
        at_slot = (slot * kv_heads + kv_head) * head_dim + column[None, :]
        own_key = key + at * key_stride + kv_head * key_head_stride + tl.zeros([1, 1], tl.int32)
        k = turned_pairs(own_key, cosine, sine, at, column[None, :], held, rotated, False)
        v = tl.load(value + at * value_stride + kv_head * value_head_stride + column[None, :], mask=held, other=0.0)
        tl.store(keys + at_slot, kept(k, keys, key_kept_scale, mantissa), mask=held)
        tl.store(values + at_slot, kept(v, values, value_kept_scale, mantissa), mask=held)
    tl.debug_barrier()  # the own key is read by other threads than those that wrote it
    slope = tl.load(slopes + head, mask=used, other=0.0) if alibi else row

    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    sums = tl.zeros([rows, width], tl.float32)
    if sunk:  # counted in one of a row's parts
        sink = tl.load(sinks + head, mask=used, other=0.0).to(tl.float32) * LOG2E
        highest = tl.where(item == start, sink, highest)
        total = tl.where(item == start, 1.0, total)
    for number in range(begin, end):
        highest, total, sums = attend_key_tile(
            number, q, highest, total, sums, keys, values, table, kv_head, length, own, slope, alibi_scaling, softcap,
            window, score_scaling, kv_heads, head_dim, width, block_size, key_tile, windowed, capped, alibi,
            rounded_alibi, mantissa, True,
        )  # fmt: skip

    mean = sums / tl.where(total > 0, total, 1.0)[:, None] * value_scale
    made = output + (at * kv_heads * group + head[:, None]) * head_dim + column[None, :]
    if after - start == 1:
        tl.store(made, mean.to(output.dtype.element_ty), mask=used[:, None] & (column < head_dim)[None, :])
        return
    part = (place + item - start).to(tl.int64) * kv_heads + kv_head
    tl.store(parts + (part * together + row[:, None]) * width + column[None, :], mean, mask=used[:, None])
    tl.store(weights + part * together + row, highest + tl.log2(total), mask=used)
    tl.debug_barrier()  # before one thread says that all have stored
    own_arrivals = arrived + place * kv_heads + kv_head
    if tl.atomic_add(own_arrivals, 1, sem="acq_rel") != after - start - 1:
        return
    tl.store(own_arrivals, 0)
    one = tl.arange(0, together)
    of_group = one < group
    joined = joined_parts(parts, weights, place, after - start, kv_head, one, of_group, kv_heads, together, width,
                          together, most_parts, at_once)  # fmt: skip
    places_made = (at * kv_heads * group + kv_head * group + one[:, None]) * head_dim + column[None, :]
    real = of_group[:, None] & (column < head_dim)[None, :]
    tl.store(output + places_made, joined.to(output.dtype.element_ty), mask=real)
