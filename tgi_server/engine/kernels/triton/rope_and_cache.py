"""Rotary positions and the writing of keys and values into their blocks, in one Triton kernel."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton import multiprocessors
from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier
from tgi_server.engine.kernels.triton.fp8 import encoded

# Programs that a multiprocessor holds. If there were more, each has several heads: starting one takes its time, too.
_PROGRAMS_PER_PROCESSOR = 32
_HEADS_TOGETHER = 4


def write(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scales: tuple[float, float], mantissa: int
) -> None:
    """Writes key and value, [tokens, kv_heads, head_dim], into their slots, [tokens] int64.

    keys and values: [blocks, block_size, kv_heads, head_dim], contiguous. scales: the scale of keys and that of values.
    mantissa: mantissa bits of caches that are uint8 (FP8); 0 if neither is.
    """
    _launch(None, None, key, value, None, keys, values, slots, scales, mantissa)


def rotate_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: tuple[float, float],
    mantissa: int,
) -> Tensor:
    """Does what `write` does with the key turned by its position. Returns the turned query, contiguous.

    rotation: cosine and sine, [tokens, rotated] each; pairs stand half of `rotated` apart.
    """
    turned = query.new_empty(query.shape)
    _launch(query, turned, key, value, rotation, keys, values, slots, scales, mantissa)
    return turned


def turns(positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns scaling * cosines and sines of positions * frequencies, [1, positions, 2 * frequencies], each twice.

    positions: [positions] int64. frequencies: [frequencies] float32, contiguous.
    """
    count, half = len(positions), len(frequencies)
    cosine, sine = torch.empty(2, 1, count, 2 * half, dtype=dtype, device=positions.device)
    _turns[count,](
        positions, frequencies, cosine, sine, scaling, half, width=triton.next_power_of_2(half), num_warps=1,
        **launch_options(positions.device),
    )  # fmt: skip
    return cosine, sine


def turn(x: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool) -> Tensor:
    """Returns x, [tokens, heads, size], with its first elements turned by its tokens' positions, contiguous.

    cosine, sine: [tokens, rotated], contiguous. interleaved: pairs are neighbours, and the first half of a row has
    their cosines and sines; otherwise pairs stand half of `rotated` apart.
    """
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, size = x.shape
    output = x.new_empty(x.shape)
    _turn[tokens, triton.cdiv(heads, _HEADS_TOGETHER)](
        x, output, cosine, sine, x.stride(0), x.stride(1), heads, size=size, width=triton.next_power_of_2(size),
        rotated=cosine.shape[1], together=_HEADS_TOGETHER, interleaved=interleaved, num_warps=1,
        **launch_options(x.device),
    )  # fmt: skip
    return output


def _launch(
    query: Tensor | None,
    turned: Tensor | None,
    key: Tensor,
    value: Tensor,
    rotation: tuple[Tensor, Tensor] | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    scales: tuple[float, float],
    mantissa: int,
) -> None:
    tokens, kv_heads, head_dim = key.shape
    queries = 0 if query is None else query.shape[1]
    key, value = (part if part.stride(2) == 1 else part.contiguous() for part in (key, value))
    query = key if query is None else query if query.stride(2) == 1 else query.contiguous()
    cosine, sine = (key, key) if rotation is None else (table.contiguous() for table in rotation)
    heads = queries + kv_heads
    many = tokens * heads > _PROGRAMS_PER_PROCESSOR * multiprocessors(key.device)
    together = gcd(queries, kv_heads, _HEADS_TOGETHER) if many else 1
    _turn_and_write[tokens, heads // together](
        query, key if turned is None else turned, key, value, cosine, sine, keys, values, slots,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *scales,
        queries=queries, kv_heads=kv_heads, head_dim=head_dim, width=triton.next_power_of_2(head_dim),
        rotated=0 if rotation is None else cosine.shape[1], mantissa=mantissa, together=together, num_warps=1,
        **launch_options(key.device),
    )  # fmt: skip


@triton.jit
def _turn_and_write(
    query, turned, key, value, cosine, sine, keys, values, slots,
    query_token, query_head, key_token, key_head, value_token, value_head,
    key_scale, value_scale,
    queries: tl.constexpr, kv_heads: tl.constexpr, head_dim: tl.constexpr, width: tl.constexpr, rotated: tl.constexpr,
    mantissa: tl.constexpr, together: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    """A program has some heads of one token: query heads, or key heads and the values of them."""
    if pdl:
        wait_for_earlier()
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * together
    head, column = (first + tl.arange(0, together))[:, None], tl.arange(0, width)[None, :]
    real = column < head_dim
    if first < queries:
        x = turned_pairs(
            query + token * query_token + head * query_head, cosine, sine, token, column, real, rotated, False
        )
        tl.store(turned + (token * queries + head) * head_dim + column, x, mask=real)
    else:
        head -= queries
        own_key = key + token * key_token + head * key_head
        x = turned_pairs(own_key, cosine, sine, token, column, real, rotated, False)
        place = (tl.load(slots + token) * kv_heads + head) * head_dim + column
        tl.store(keys + place, kept(x, keys, key_scale, mantissa), mask=real)
        v = tl.load(value + token * value_token + head * value_head + column, mask=real)
        tl.store(values + place, kept(v, values, value_scale, mantissa), mask=real)


@triton.jit
def _turns(positions, frequencies, cosine, sine, scaling, half, width: tl.constexpr, pdl: tl.constexpr = False):
    if pdl:
        wait_for_earlier()
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    real = column < half
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + column, mask=real, other=0.0)
    place = token * 2 * half + column
    c, s = (tl.cos(angle) * scaling).to(cosine.dtype.element_ty), (tl.sin(angle) * scaling).to(sine.dtype.element_ty)
    tl.store(cosine + place, c, mask=real)
    tl.store(cosine + place + half, c, mask=real)
    tl.store(sine + place, s, mask=real)
    tl.store(sine + place + half, s, mask=real)


@triton.jit
def _turn(
    x, output, cosine, sine, x_token, x_head, heads, size: tl.constexpr, width: tl.constexpr, rotated: tl.constexpr,
    together: tl.constexpr, interleaved: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    if pdl:
        wait_for_earlier()
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, width)[None, :]
    head = (tl.program_id(1) * together + tl.arange(0, together))[:, None]
    real = (head < heads) & (column < size)
    turned = turned_pairs(x + token * x_token + head * x_head, cosine, sine, token, column, real, rotated, interleaved)
    tl.store(output + (token * heads + head) * size + column, turned, mask=real)


@triton.jit
def kept(x, cache, scale, mantissa: tl.constexpr):
    """Returns numbers in the form in which the cache stores them."""
    if cache.dtype.element_ty == tl.uint8:
        x = encoded(x.to(tl.float32), scale, mantissa)
    return x


@triton.jit
def turned_pairs(x, cosine, sine, token, column, real, rotated: tl.constexpr, interleaved: tl.constexpr):
    """Returns the elements at x, [heads, 1], with the first `rotated` turned in pairs, in their dtype.

    column: [1, elements]. real: those that there are. interleaved: pairs are neighbours.
    """
    own = tl.load(x + column, mask=real, other=0.0)
    if rotated == 0:
        return own
    half: tl.constexpr = rotated // 2
    first, other, angle = column < half, tl.where(column < half, column + half, column - half), column
    if interleaved:
        first, other, angle = column % 2 == 0, column ^ 1, column // 2
    inside = column < rotated
    beside = tl.load(x + other, mask=real & inside, other=0.0)
    c = tl.load(cosine + token * rotated + angle, mask=inside, other=1.0).to(tl.float32)
    s = tl.load(sine + token * rotated + angle, mask=inside, other=0.0).to(tl.float32)
    return (own.to(tl.float32) * c + beside.to(tl.float32) * tl.where(first, -s, s)).to(own.dtype)
