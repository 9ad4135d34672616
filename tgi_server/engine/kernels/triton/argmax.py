"""The argmax of each row in two Triton kernels: of parts of it, on many processors, then of these.

torch has one program for a row: one row of a large vocabulary leaves the rest of the device idle.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier

_AT_ONCE = 4096


def argmax(scores: Tensor) -> Tensor:
    """Returns the place of each row's highest score, the first of equals: [rows] int64. scores: [rows, tokens]."""
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    rows, tokens = scores.shape
    parts = triton.cdiv(tokens, _AT_ONCE)
    highest = torch.empty(rows, parts, dtype=torch.float32, device=scores.device)
    places = torch.empty(rows, parts, dtype=torch.int64, device=scores.device)
    found = torch.empty(rows, dtype=torch.int64, device=scores.device)
    options = launch_options(scores.device)
    _highest_of_part[rows, parts](scores, highest, places, tokens, scores.stride(0), at_once=_AT_ONCE, **options)
    _highest_of_row[rows,](highest, places, found, tokens, parts=parts, width=triton.next_power_of_2(parts), **options)
    return found


@triton.jit
def _highest_of_part(scores, highest, places, tokens, stride, at_once: tl.constexpr, pdl: tl.constexpr = False):
    if pdl:
        wait_for_earlier()
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = part * at_once + tl.arange(0, at_once)
    own = tl.load(scores + row * stride + column, mask=column < tokens, other=float("-inf")).to(tl.float32)
    best = tl.max(own, 0)
    tl.store(highest + row * parts + part, best)
    tl.store(places + row * parts + part, _first(own == best, column, tokens).to(tl.int64))


@triton.jit
def _highest_of_row(
    highest, places, found, tokens, parts: tl.constexpr, width: tl.constexpr, pdl: tl.constexpr = False
):
    if pdl:
        wait_for_earlier()
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    own = tl.load(highest + row * parts + part, mask=part < parts, other=float("-inf"))
    place = tl.load(places + row * parts + part, mask=part < parts, other=0)
    real = (own == tl.max(own, 0)) & (part < parts)
    tl.store(found + row, _first(real, place, tokens))


@triton.jit
def _first(there, place, tokens):
    """Returns the first place for which `there` is true. If it is true for none (all NaN), returns a valid place."""
    return tl.min(tl.where(there, place, tokens - 1), 0)
