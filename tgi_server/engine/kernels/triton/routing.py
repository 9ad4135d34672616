"""A mixture's work around its products on a GPU, one Triton kernel for each step: choosing the experts of a token,
grouping the rows by expert, and summing the experts' outputs.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier

# Every expert's program reads all rows; for more rows than this, sorting takes less work.
MOST_GROUPED = 4096
_ROWS_AT_ONCE, _FEW_ROWS = 1024, 128
_COLUMNS_AT_ONCE = 1024


def route(
    logits: Tensor,
    bias: Tensor | None,
    factors: Tensor | None,
    dtype: torch.dtype,
    *,
    chosen: int,
    sigmoid: bool,
    groups: int,
    chosen_groups: int,
    group_scores: int,
    normalised: bool,
    factor: float,
) -> tuple[Tensor, Tensor]:
    """Returns the experts of each token, int64, the best first and of equals the first, and their shares, in `dtype`:
    [tokens, chosen] each.

    logits: [tokens, experts]. bias, factors: [experts]. The others are those of MixtureSpec.
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    numbers = torch.empty(tokens, chosen, dtype=torch.int64, device=logits.device)
    shares = torch.empty(tokens, chosen, dtype=dtype, device=logits.device)
    _route[tokens,](
        logits, bias, factors, numbers, shares, factor, logits.stride(0),
        groups=groups, of_group=experts // groups, all_groups=triton.next_power_of_2(groups),
        width=triton.next_power_of_2(experts // groups), chosen=chosen, all_chosen=triton.next_power_of_2(chosen),
        sigmoid=sigmoid, chosen_groups=chosen_groups, group_scores=group_scores, normalised=normalised, num_warps=1,
        **launch_options(logits.device),
    )  # fmt: skip
    return numbers, shares


def grouped_rows(chosen: Tensor, experts: int, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `order`, `starts` and `tile_ends` of RowGroups. chosen: int64, contiguous, of MOST_GROUPED rows at most.

    tile: rows of a tile.
    """
    rows, device = chosen.numel(), chosen.device
    order = torch.empty(rows, dtype=torch.int64, device=device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=device)
    tile_ends = torch.empty(experts, dtype=torch.int32, device=device)
    at_once = _FEW_ROWS if rows <= _FEW_ROWS else _ROWS_AT_ONCE
    _group_rows[experts,](
        chosen, order, starts, tile_ends, rows, tile=tile, at_once=at_once, bins=triton.next_power_of_2(experts + 1),
        num_warps=4 if at_once > _FEW_ROWS else 1, **launch_options(device),
    )  # fmt: skip
    return order, starts, tile_ends


def summed(outputs: Tensor, shared: Tensor | None, gate: Tensor | None, residual: Tensor | None) -> Tensor:
    """Returns the sums of the outputs of each token's experts, of the shared one's and of the residual, [tokens, size].

    outputs: [tokens, experts of a token, size], contiguous. shared, residual: [tokens, size] or None. gate: [tokens,
    1], of the shared expert, whose output is multiplied by its sigmoid; or None.
    """
    tokens, count, size = outputs.shape
    given = [None if each is None else each.contiguous() for each in (shared, gate, residual)]
    total = outputs.new_empty(tokens, size)
    _sum[tokens, triton.cdiv(size, _COLUMNS_AT_ONCE)](
        outputs, *given, total, size, count=count, at_once=_COLUMNS_AT_ONCE, num_warps=4,
        **launch_options(outputs.device),
    )  # fmt: skip
    return total


@triton.jit
def _highest(values):
    return tl.max(tl.max(values, 1), 0)


@triton.jit(do_not_specialize=["stride"])
def _route(
    logits, bias, factors, numbers, shares, factor, stride,
    groups: tl.constexpr, of_group: tl.constexpr, all_groups: tl.constexpr, width: tl.constexpr,
    chosen: tl.constexpr, all_chosen: tl.constexpr, sigmoid: tl.constexpr,
    chosen_groups: tl.constexpr, group_scores: tl.constexpr, normalised: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    """A program has one token. Experts stand in a table of groups, [all_groups, width]."""
    if pdl:
        wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    group, place = tl.arange(0, all_groups)[:, None], tl.arange(0, width)[None, :]
    expert, real = group * of_group + place, (group < groups) & (place < of_group)
    last: tl.constexpr = groups * of_group - 1  # what NaNs choose
    own = tl.load(logits + token * stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    if sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-own))
    else:
        scores = tl.exp(own - _highest(own))
        scores = scores / tl.sum(tl.sum(scores, 1), 0)
    ranks = scores
    if bias is not None:
        ranks += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    ranks = tl.where(real, ranks, float("-inf"))
    if groups > 1:
        best, total = ranks, tl.zeros([all_groups], tl.float32)
        for _ in tl.static_range(group_scores):
            highest = tl.max(best, 1)
            total += highest
            first = tl.min(tl.where(best == highest[:, None], place, width), 1)
            best = tl.where(place == first[:, None], float("-inf"), best)
        number = tl.arange(0, all_groups)
        allowed = number < 0
        for _ in tl.static_range(chosen_groups):
            there = (total == tl.max(total, 0)) & (number < groups) & (allowed == 0)
            taken = number == tl.min(tl.where(there, number, groups - 1), 0)
            allowed = allowed | taken
            total = tl.where(taken, float("-inf"), total)
        ranks = tl.where(allowed[:, None], ranks, float("-inf"))
    position = tl.arange(0, all_chosen)
    found, share = tl.zeros([all_chosen], tl.int32), tl.zeros([all_chosen], tl.float32)
    left = real
    for turn in tl.static_range(chosen):
        there = (ranks == _highest(ranks)) & left
        at = tl.minimum(tl.min(tl.min(tl.where(there, expert, last), 1), 0), last)
        taken = expert == at
        found = tl.where(position == turn, at, found)
        share = tl.where(position == turn, tl.sum(tl.sum(tl.where(taken & real, scores, 0.0), 1), 0), share)
        ranks = tl.where(taken, float("-inf"), ranks)
        left = left & (taken == 0)
    if normalised:
        share = share / tl.sum(share, 0)
    share *= factor
    held = position < chosen
    if factors is not None:
        share *= tl.load(factors + found, mask=held, other=0.0).to(tl.float32)
    tl.store(numbers + token * chosen + position, found.to(tl.int64), mask=held)
    tl.store(shares + token * chosen + position, share.to(shares.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["rows"])
def _group_rows(
    chosen, order, starts, tile_ends, rows,
    tile: tl.constexpr, at_once: tl.constexpr, bins: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    """A program has one expert. Padding rows are in the bin after those of the experts."""
    if pdl:
        wait_for_earlier()
    expert, experts = tl.program_id(0), tl.num_programs(0)
    place, known = tl.arange(0, at_once), tl.arange(0, bins)
    counts = tl.zeros([bins], tl.int32)
    for first in range(0, rows, at_once):
        row = first + place
        counts += tl.histogram(tl.load(chosen + row, mask=row < rows, other=experts).to(tl.int32), bins)
    start = tl.sum(tl.where(known < expert, counts, 0), 0)
    tl.store(starts + expert, start)
    tl.store(tile_ends + expert, tl.sum(tl.where(known <= expert, tl.cdiv(counts, tile), 0), 0))
    if expert == 0:
        tl.store(starts + experts, rows)
    for first in range(0, rows, at_once):
        row = first + place
        own = (tl.load(chosen + row, mask=row < rows, other=experts) == expert).to(tl.int32)
        tl.store(order + start + tl.cumsum(own, 0) - own, row.to(tl.int64), mask=own > 0)
        start += tl.sum(own, 0)


@triton.jit
def _sum(
    outputs, shared, gate, residual, total, size, count: tl.constexpr, at_once: tl.constexpr, pdl: tl.constexpr = False
):
    """Each sum is rounded before the next, as torch does it."""
    if pdl:
        wait_for_earlier()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * at_once + tl.arange(0, at_once)
    real = column < size
    kind: tl.constexpr = total.dtype.element_ty
    sums = tl.zeros([at_once], tl.float32)
    for expert in tl.static_range(count):
        sums += tl.load(outputs + (token * count + expert) * size + column, mask=real, other=0.0).to(tl.float32)
    if shared is not None:
        beside = tl.load(shared + token * size + column, mask=real, other=0.0).to(tl.float32)
        if gate is not None:
            opened = 1.0 / (1.0 + tl.exp(-tl.load(gate + token).to(tl.float32)))
            beside = (opened.to(kind).to(tl.float32) * beside).to(kind).to(tl.float32)
        sums = sums.to(kind).to(tl.float32) + beside
    if residual is not None:
        sums = sums.to(kind).to(tl.float32) + tl.load(residual + token * size + column, mask=real, other=0.0).to(
            tl.float32
        )
    tl.store(total + token * size + column, sums.to(kind), mask=real)
