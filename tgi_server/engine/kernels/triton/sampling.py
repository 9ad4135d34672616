"""Temperature, top_k, top_p, min_p and the draw of a token, for all of a row at once, as one Triton kernel.

It does what `warpers.py` and `random.py` do, with the same integers: weights, sums and thresholds are the same to the
last bit where the exponential is. A program has one row. It never sorts: a threshold is found digit by digit, four bits
at a time, and each digit takes one look at the row.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens that a program looks at together, and its warps.
_AT_ONCE = 1024
_WARPS = 16


def choose(
    scores: Tensor, settings: Tensor, top_k: Tensor, seeds: Tensor, steps: Tensor, warped: Tensor | None = None
) -> Tensor:
    """Returns the tokens that are drawn, int64 [rows], from scores, float32 [rows, tokens], contiguous.

    settings: float64 [rows, 3]: temperature, top_p and min_p; 1, 1 and 0 leave out their rule. top_k: int64 [rows]; 0
    leaves it out. seeds, steps: int64 [rows], of which the random numbers are a function. warped: where the scores go
    with excluded tokens at minus infinity, of their shape; None: nowhere.
    """
    rows, tokens = scores.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=scores.device)
    _choose[rows,](
        scores, settings, top_k, seeds, steps, scores if warped is None else warped, chosen, tokens,
        writes=warped is not None, at_once=_AT_ONCE, num_warps=_WARPS,
    )  # fmt: skip
    return chosen


@triton.jit
def _choose(
    scores, settings, top_ks, seeds, steps, warped, chosen, tokens, writes: tl.constexpr, at_once: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    scores += row.to(tl.int64) * tokens
    temperature = tl.load(settings + 3 * row).to(tl.float32)
    top_p = tl.load(settings + 3 * row + 1)
    min_p = tl.load(settings + 3 * row + 2).to(tl.float32)
    top_k = tl.load(top_ks + row)

    highest = tl.full([at_once], float("-inf"), tl.float32)
    for first in range(0, tokens, at_once):
        highest = tl.maximum(highest, _scaled(scores, first, tokens, temperature, at_once))
    # a row without any possible token stays a row of minus infinity instead of becoming no number
    peak = tl.maximum(tl.max(highest, 0), -3.4028234663852886e38)

    kept = tl.full([], 0, tl.int64)  # the lowest key of a token that top_k keeps
    if (top_k > 0) & (top_k < tokens):
        kept = _threshold(scores, tokens, temperature, peak, kept, top_k, False, at_once)
    worst, ties_excluded = kept, tl.full([], 0, tl.int64)
    if top_p != 1.0:
        weight, _ = _weight(scores, tokens, temperature, peak, kept, kept, at_once)
        target = tl.minimum(tl.maximum(tl.ceil(weight.to(tl.float64) * top_p).to(tl.int64), 1), weight)
        worst = _threshold(scores, tokens, temperature, peak, kept, target, True, at_once)
        better, ties = _weight(scores, tokens, temperature, peak, worst + 1, worst, at_once)
        of_one = tl.maximum(_weight_of(_value(worst), peak), 1)
        ties_excluded = ties - (target - better + of_one - 1) // of_one

    total = tl.zeros([at_once], tl.int64)
    seen = tl.full([], 0, tl.int64)
    for first in range(0, tokens, at_once):
        x, weight, tie = _kept(scores, first, tokens, temperature, peak, worst, seen, ties_excluded, min_p, at_once)
        total += weight
        seen += tl.sum(tie, 0)
        if writes:
            column = first + tl.arange(0, at_once)
            tl.store(warped + row.to(tl.int64) * tokens + column, x, mask=column < tokens)

    number = _uniform(tl.load(seeds + row), tl.load(steps + row))
    aim = (number * tl.sum(total, 0).to(tl.float64)).to(tl.int64)
    token = tl.full([], 0, tl.int32) + tokens - 1
    running, seen = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for first in range(0, tokens, at_once):
        _, weight, tie = _kept(scores, first, tokens, temperature, peak, worst, seen, ties_excluded, min_p, at_once)
        reached = running + tl.cumsum(weight, 0) > aim
        column = first + tl.arange(0, at_once)
        token = tl.minimum(token, tl.min(tl.where(reached, column, tokens - 1), 0))
        running += tl.sum(weight, 0)
        seen += tl.sum(tie, 0)
    tl.store(chosen + row, token.to(tl.int64))


@triton.jit
def _scaled(scores, first, tokens, temperature, at_once: tl.constexpr):
    """Returns some scores by the temperature. Adding zero makes one zero of the two."""
    column = first + tl.arange(0, at_once)
    x = tl.load(scores + column, mask=column < tokens, other=float("-inf"))
    return tl.div_rn(x, tl.zeros([at_once], tl.float32) + temperature) + 0.0


@triton.jit
def _key(x):
    """Returns int64 from 0 to 2^32 - 1 that are ordered as the float32 values are."""
    bits = x.to(tl.int32, bitcast=True)
    # negative floats grow in magnitude with their bits: all bits are turned round; others get the sign bit
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _value(key):
    """Returns the float32 value that has a key."""
    bits = key.to(tl.int32)
    return (bits ^ (~(bits >> 31) | -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(x, peak):
    """Returns what tokens weigh: 2^40 for the likeliest one, 0 from e^-28 of that on."""
    return (tl.exp(tl.maximum(x - peak, -28.0)) * 1099511627776.0).to(tl.int64)


@triton.jit
def _threshold(scores, tokens, temperature, peak, kept, target, weighted: tl.constexpr, at_once: tl.constexpr):
    """Returns the highest key such that the tokens from it on weigh, or where not weighted count, `target` or more.

    kept: tokens below it do not count.
    """
    key = tl.full([], 0, tl.int64)
    for digit in range(0, 8):
        shift = 28 - 4 * digit
        candidates = key + (tl.arange(0, 16).to(tl.int64) << shift)
        sums = tl.zeros([16, at_once], tl.int64)
        for first in range(0, tokens, at_once):
            x = _scaled(scores, first, tokens, temperature, at_once)
            own = _key(x)
            there = (first + tl.arange(0, at_once) < tokens) & (own >= kept)
            weight = _weight_of(x, peak) if weighted else tl.full([at_once], 1, tl.int64)
            weight = tl.where(there, weight, 0)
            sums += tl.where(own[None, :] >= candidates[:, None], weight[None, :], 0)
        reached = tl.sum(sums, 1) >= target
        key += tl.maximum(tl.sum(reached.to(tl.int64), 0) - 1, 0) << shift
    return key


@triton.jit
def _weight(scores, tokens, temperature, peak, lowest, tied, at_once: tl.constexpr):
    """Returns the weight of the tokens with keys from `lowest` on, and how many have the key `tied`."""
    weights, ties = tl.zeros([at_once], tl.int64), tl.zeros([at_once], tl.int64)
    for first in range(0, tokens, at_once):
        x = _scaled(scores, first, tokens, temperature, at_once)
        own = _key(x)
        there = first + tl.arange(0, at_once) < tokens
        weights += tl.where(there & (own >= lowest), _weight_of(x, peak), 0)
        ties += (there & (own == tied)).to(tl.int64)
    return tl.sum(weights, 0), tl.sum(ties, 0)


@triton.jit
def _kept(
    scores, first, tokens, temperature, peak, worst, seen, ties_excluded, min_p, at_once: tl.constexpr
):  # fmt: skip
    """Returns some scores with excluded tokens at minus infinity, their weights, and 1 for each with the worst key.

    seen: how many came before with that key; of these the first `ties_excluded` are excluded.
    """
    x = _scaled(scores, first, tokens, temperature, at_once)
    own = _key(x)
    there = first + tl.arange(0, at_once) < tokens
    tie = (there & (own == worst)).to(tl.int64)
    excluded = (own < worst) | ((tie > 0) & (seen + tl.cumsum(tie, 0) <= ties_excluded))
    excluded |= tl.exp(tl.maximum(x - peak, -28.0)) < min_p
    weight = tl.where(there & ~excluded, _weight_of(x, peak), 0)
    return tl.where(excluded, float("-inf"), x), weight, tie


@triton.jit
def _uniform(seed, step):
    """Returns the float64 in [0, 1) that `random.uniform` returns."""
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    mixed = _mix(_mix(seed.to(tl.uint64, bitcast=True) + golden) + step.to(tl.uint64, bitcast=True) * golden)
    return (mixed >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mix(bits):
    """SplitMix64's finaliser."""
    bits = (bits ^ (bits >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
    bits = (bits ^ (bits >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
    return bits ^ (bits >> 31)
