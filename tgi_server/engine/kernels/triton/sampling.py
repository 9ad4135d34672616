"""Temperature, top_k, top_p, min_p and the draw of a token, for all of a row at once, as one Triton kernel.

It computes what `warpers.py` and `random.py` do, with the same integers: weights, sums and thresholds are equal to the
last bit if the exponential is. A program has one row. It never sorts: a threshold is searched digit by digit, two bits
at a time. With top_k or top_p it is searched among candidates alone, some 1,400 or 2,800 of the highest scores, which
registers hold. If these are too few, or too many, each digit is searched in the whole row.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton import multiprocessors

# Tokens that a program looks at together, which is also the most candidates, and its warps: of so few rows that each
# has a multiprocessor to itself, and of more.
SHAPE_OF_FEW, SHAPE_OF_MANY = (4096, 16), (2048, 8)
# Bits that thresholds are searched with: of a score; of the lowest candidate's, which need not be exact; of a token.
_SCORE_BITS = tl.constexpr(32)
_ROUGH_BITS = tl.constexpr(20)
_TOKEN_BITS = tl.constexpr(20)
_LAST_TOKEN = tl.constexpr(2**20 - 1)


def choose(
    scores: Tensor, settings: Tensor, top_k: Tensor, seeds: Tensor, steps: Tensor, warped: Tensor | None = None
) -> Tensor:
    """Returns the tokens that are drawn, int64 [rows], from scores, float32 [rows, tokens], contiguous.

    settings: float64 [rows, 3]: temperature, top_p and min_p; 1, 1 and 0 leave out their rule. top_k: int64 [rows]; 0
    leaves it out. seeds, steps: int64 [rows], which determine the random numbers. warped: where the scores go
    with excluded tokens at minus infinity, of their shape; None: nowhere.
    """
    rows, tokens = scores.shape
    at_once, warps = SHAPE_OF_FEW if rows <= multiprocessors(scores.device) else SHAPE_OF_MANY
    chosen = torch.empty(rows, dtype=torch.int64, device=scores.device)
    candidates = torch.empty(rows, at_once, dtype=torch.float32, device=scores.device)
    columns = torch.empty(rows, at_once, dtype=torch.int32, device=scores.device)
    sums = torch.empty(rows, triton.cdiv(tokens, at_once), 2, dtype=torch.int64, device=scores.device)
    _choose[rows,](
        scores, settings, top_k, seeds, steps, scores if warped is None else warped, candidates, columns, sums,
        chosen, tokens, writes=warped is not None, at_once=at_once, num_warps=warps,
    )  # fmt: skip
    return chosen


@triton.jit(do_not_specialize=["tokens"])  # see `_choose_candidate`: as multiples of 16, rows would be read in fours
def _choose(
    scores, settings, top_ks, seeds, steps, warped, candidates, columns, sums, chosen, tokens,
    writes: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    scores += row.to(tl.int64) * tokens
    warped += row.to(tl.int64) * tokens
    candidates += row.to(tl.int64) * at_once
    columns += row.to(tl.int64) * at_once
    sums += row.to(tl.int64) * tl.cdiv(tokens, at_once) * 2
    temperature = tl.load(settings + 3 * row).to(tl.float32)
    top_p = tl.load(settings + 3 * row + 1)
    min_p = tl.load(settings + 3 * row + 2).to(tl.float32)
    top_k = tl.load(top_ks + row)
    random = _uniform(tl.load(seeds + row), tl.load(steps + row))
    limited, nucleus = (top_k > 0) & (top_k < tokens), top_p != 1.0

    highest = tl.full([at_once], float("-inf"), tl.float32)
    for first in tl.range(0, tokens, at_once, loop_unroll_factor=4):
        column = first + tl.arange(0, at_once)
        highest = tl.maximum(highest, tl.load(scores + column, mask=column < tokens, other=float("-inf")))
    # a row without any possible token stays a row of minus infinity instead of becoming no number
    peak = tl.maximum(_by_temperature(tl.max(highest, 0), temperature), -3.4028234663852886e38)
    lowest_key = tl.full([], 0, tl.uint32)
    weight = tl.full([], 0, tl.int64)  # of the tokens that top_p chooses from
    if nucleus & (limited == 0):
        weight, _ = _weight(scores, tokens, temperature, peak, lowest_key, lowest_key, at_once)

    token = tl.full([], -1, tl.int32)
    if (limited | nucleus) & (tokens <= _LAST_TOKEN):
        lowest, count = _collect(scores, tokens, highest, candidates, columns, at_once)
        if count <= at_once:
            token, worst, ties_end = _choose_candidate(
                candidates, columns, count, tokens, lowest, temperature, peak, top_k, limited, top_p, nucleus, weight,
                min_p, random, at_once,
            )  # fmt: skip
            if writes and token >= 0:
                for first in range(0, tokens, at_once):
                    column = first + tl.arange(0, at_once)
                    x = _scaled(scores, first, tokens, temperature, at_once)
                    excluded = (_key(x) < worst) | ((_key(x) == worst) & (column < ties_end))
                    excluded |= tl.exp(tl.maximum(x - peak, -28.0)) < min_p
                    tl.store(warped + column, tl.where(excluded, float("-inf"), x), mask=column < tokens)
    if token < 0:
        token = _choose_from_row(
            scores, tokens, temperature, peak, top_k, limited, top_p, nucleus, weight, min_p, random, warped, sums,
            writes, at_once,
        )  # fmt: skip
    tl.store(chosen + row, token.to(tl.int64))


@triton.jit
def _collect(scores, tokens, highest, candidates, columns, at_once: tl.constexpr):
    """Writes the highest scores and their tokens. Returns a score and how many are not below it: these are written.

    If these are more than `at_once`, nothing is written. highest: [at_once]; the highest score of every `at_once`th
    token. The median of these is the lowest candidate: so there are at least half as many, and seldom twice.
    """
    one = tl.full([at_once], 1, tl.int32)
    lowest = _value(_threshold_of(_key(highest), one, at_once // 2, _SCORE_BITS, _ROUGH_BITS))
    lowest = tl.where(lowest == lowest, lowest, float("-inf"))  # the key of minus infinity, cut short, is no number's
    number = tl.zeros([at_once], tl.int32)
    for first in tl.range(0, tokens, at_once, loop_unroll_factor=4):
        _, candidate, _ = _candidates(scores, first, tokens, lowest, at_once)
        number += candidate.to(tl.int32)
    count = tl.sum(number, 0)
    if count <= at_once:
        place = tl.cumsum(number, 0) - number
        for first in tl.range(0, tokens, at_once):
            x, candidate, column = _candidates(scores, first, tokens, lowest, at_once)
            tl.store(candidates + place, x, mask=candidate)
            tl.store(columns + place, column, mask=candidate)
            place += candidate.to(tl.int32)
    tl.debug_barrier()  # other threads read what these have written
    return lowest, count


@triton.jit
def _candidates(scores, first, tokens, lowest, at_once: tl.constexpr):
    """Returns some scores, which of them are candidates, and their tokens."""
    column = first + tl.arange(0, at_once)
    x = tl.load(scores + column, mask=column < tokens, other=float("-inf"))
    return x, (x >= lowest) & (x > float("-inf")), column


@triton.jit
def _choose_candidate(
    candidates, columns, count, tokens, lowest, temperature, peak, top_k, limited, top_p, nucleus, weight, min_p,
    random, at_once: tl.constexpr,
):  # fmt: skip
    """Returns the token, the lowest key of one that is not excluded, and the first token whose tie with it is not.

    The token is -1 if a token that is not a candidate may have the lowest key, or a higher one.
    """
    # The program's second number is 0, which the compiler does not know. So it gives no thread neighbouring numbers,
    # here or elsewhere, and those that are scattered to the candidates need not change hands before.
    place = tl.arange(0, at_once) ^ tl.program_id(1)
    there = place < count
    x = _by_temperature(tl.load(candidates + place, mask=there, other=float("-inf")), temperature)
    # higher for the tokens that come first
    order = (~tl.load(columns + place, mask=there, other=0) & _LAST_TOKEN).to(tl.uint32)
    own = tl.where(there, _key(x), 0)
    weights = tl.where(there, _weight_of(x, peak), 0)
    worst, bound = tl.full([], 0, tl.uint32), _key(_by_temperature(lowest, temperature))
    found = worst == 0
    if limited:
        worst = _threshold_of(own, there.to(tl.int32), top_k, _SCORE_BITS, _SCORE_BITS)
        found = worst > bound
        weight = tl.sum(tl.where(own >= worst, weights, 0), 0)
    ties_excluded = tl.full([], 0, tl.int64)
    if nucleus:
        target = _target(weight, top_p)
        worst = _threshold_of(own, tl.where(own >= worst, weights, 0), target, _SCORE_BITS, _SCORE_BITS)
        ties_excluded = _ties_excluded(
            target, tl.sum(tl.where(own > worst, weights, 0), 0), tl.sum((own == worst).to(tl.int64), 0), worst, peak
        )
    ties_end = tl.full([], 0, tl.int32)
    excluded = own < worst
    if ties_excluded > 0:
        tie = there & (own == worst)
        last = _threshold_of(tl.where(tie, order, 0), tie.to(tl.int32), ties_excluded, _TOKEN_BITS, _TOKEN_BITS)
        ties_end = (~last.to(tl.int32) & _LAST_TOKEN) + 1
        excluded |= tie & (order >= last)
    excluded |= tl.exp(tl.maximum(x - peak, -28.0)) < min_p
    weights = tl.where(excluded, 0, weights)
    total = tl.sum(weights, 0)
    aim = (random * total.to(tl.float64)).to(tl.int64)
    drawn = _threshold_of(order, weights, aim + 1, _TOKEN_BITS, _TOKEN_BITS).to(tl.int32)
    token = tl.where(total > 0, ~drawn & _LAST_TOKEN, tokens - 1)
    found = (found & (worst > bound)) | (lowest == float("-inf"))
    return tl.where(found, token, -1), worst, ties_end


@triton.jit
def _choose_from_row(
    scores, tokens, temperature, peak, top_k, limited, top_p, nucleus, weight, min_p, random, warped, sums,
    writes: tl.constexpr, at_once: tl.constexpr,
):  # fmt: skip
    """sums: of each look at the row, the weight of its tokens, and how many ties came before."""
    worst, ties_excluded = tl.full([], 0, tl.uint32), tl.full([], 0, tl.int64)
    if limited:
        worst = _threshold(scores, tokens, temperature, peak, worst, top_k, False, at_once)
    if nucleus:
        if limited:
            weight, _ = _weight(scores, tokens, temperature, peak, worst, worst, at_once)
        target = _target(weight, top_p)
        worst = _threshold(scores, tokens, temperature, peak, worst, target, True, at_once)
        better, ties = _weight(scores, tokens, temperature, peak, worst + 1, worst, at_once)
        ties_excluded = _ties_excluded(target, better, ties, worst, peak)

    total, seen = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for first in range(0, tokens, at_once):
        x, weights, behind = _kept(scores, first, tokens, temperature, peak, worst, seen, ties_excluded, min_p, at_once)
        look = sums + first // at_once * 2
        weight = tl.sum(weights, 0)
        tl.store(look, weight)
        tl.store(look + 1, seen)
        total += weight
        seen = behind
        if writes:
            column = first + tl.arange(0, at_once)
            tl.store(warped + column, x, mask=column < tokens)
    tl.debug_barrier()
    aim = (random * total.to(tl.float64)).to(tl.int64)
    token, running = tokens - 1, tl.full([], 0, tl.int64)
    for first in range(0, tokens, at_once):
        if running <= aim:
            look = sums + first // at_once * 2
            before = running
            running += tl.load(look)
            if running > aim:
                _, weights, _ = _kept(
                    scores, first, tokens, temperature, peak, worst, tl.load(look + 1), ties_excluded, min_p, at_once
                )
                column = first + tl.arange(0, at_once)
                token = tl.min(tl.where(before + tl.cumsum(weights, 0) > aim, column, tokens - 1), 0)
    return token


@triton.jit
def _by_temperature(x, temperature):
    """Adding zero makes one zero of the two."""
    return tl.div_rn(x, tl.zeros_like(x) + temperature) + 0.0


@triton.jit
def _scaled(scores, first, tokens, temperature, at_once: tl.constexpr):
    """Returns some scores by the temperature."""
    column = first + tl.arange(0, at_once)
    x = tl.load(scores + column, mask=column < tokens, other=float("-inf"))
    return _by_temperature(x, temperature)


@triton.jit
def _key(x):
    """Returns uint32 numbers that are ordered as the float32 values are."""
    bits = x.to(tl.int32, bitcast=True)
    # negative floats grow in magnitude with their bits: all bits are turned round; others get the sign bit
    return (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)


@triton.jit
def _value(key):
    """Returns the float32 value that has a key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _weight_of(x, peak):
    """Returns the integer weights of tokens: 2^40 for the likeliest, 0 for those below e^-28 of its probability."""
    return (tl.exp(tl.maximum(x - peak, -28.0)) * 1099511627776.0).to(tl.int64)


@triton.jit
def _target(weight, top_p):
    """Returns the total weight that top_p requires of the tokens that it keeps."""
    return tl.minimum(tl.maximum(tl.ceil(weight.to(tl.float64) * top_p).to(tl.int64), 1), weight)


@triton.jit
def _ties_excluded(target, better, ties, worst, peak):
    """Returns how many of the tokens with the worst key are not needed for the target; better: weight of the others."""
    of_one = tl.maximum(_weight_of(_value(worst), peak), 1)
    return ties - (target - better + of_one - 1) // of_one


@triton.jit
def _threshold_of(keys, weights, target, bits: tl.constexpr, exact: tl.constexpr):
    """Returns the highest key such that those from it on weigh the target or more; 0 if all of them do not.

    bits: of a key. exact: the upper bits that are searched for; the others are 0.
    """
    key = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1, tl.uint32) << (bits - 2)
    for _ in range(0, exact // 2):
        one, two, three = key + unit, key + 2 * unit, key + 3 * unit
        if tl.sum(tl.where(keys >= two, weights, 0), 0) >= target:
            reached = tl.sum(tl.where(keys >= three, weights, 0), 0) >= target
            key = tl.where(reached, three, two)
        else:
            reached = tl.sum(tl.where(keys >= one, weights, 0), 0) >= target
            key = tl.where(reached, one, key)
        unit = unit >> 2
    return key


@triton.jit
def _threshold(scores, tokens, temperature, peak, kept, target, weighted: tl.constexpr, at_once: tl.constexpr):
    """Returns the highest key such that the tokens from it on weigh, or where not weighted count, `target` or more.

    kept: tokens below it do not count.
    """
    key = tl.full([], 0, tl.uint32)
    unit = tl.full([], 1 << 30, tl.uint32)
    for _ in range(0, _SCORE_BITS // 2):
        one, two, three = key + unit, key + 2 * unit, key + 3 * unit
        kind: tl.constexpr = tl.int64 if weighted else tl.int32
        from_one, from_two = tl.zeros([at_once], kind), tl.zeros([at_once], kind)
        from_three = tl.zeros([at_once], kind)
        for first in range(0, tokens, at_once):
            x = _scaled(scores, first, tokens, temperature, at_once)
            own = _key(x)
            there = (first + tl.arange(0, at_once) < tokens) & (own >= kept)
            weight = tl.where(there, _weight_of(x, peak), 0) if weighted else there.to(tl.int32)
            from_one += tl.where(own >= one, weight, 0)
            from_two += tl.where(own >= two, weight, 0)
            from_three += tl.where(own >= three, weight, 0)
        if tl.sum(from_three, 0) >= target:
            key = three
        elif tl.sum(from_two, 0) >= target:
            key = two
        elif tl.sum(from_one, 0) >= target:
            key = one
        unit = unit >> 2
    return key


@triton.jit
def _weight(scores, tokens, temperature, peak, lowest, tied, at_once: tl.constexpr):
    """Returns the weight of the tokens with keys from `lowest` on, and how many have the key `tied`."""
    weights, ties = tl.zeros([at_once], tl.int64), tl.zeros([at_once], tl.int32)
    for first in range(0, tokens, at_once):
        x = _scaled(scores, first, tokens, temperature, at_once)
        own = _key(x)
        there = first + tl.arange(0, at_once) < tokens
        weights += tl.where(there & (own >= lowest), _weight_of(x, peak), 0)
        ties += (there & (own == tied)).to(tl.int32)
    return tl.sum(weights, 0), tl.sum(ties, 0).to(tl.int64)


@triton.jit
def _kept(
    scores, first, tokens, temperature, peak, worst, seen, ties_excluded, min_p, at_once: tl.constexpr
):  # fmt: skip
    """Returns some scores with excluded tokens at minus infinity, their weights, and `seen` after them.

    seen: how many came before with the worst key; of these the first `ties_excluded` are excluded.
    """
    x = _scaled(scores, first, tokens, temperature, at_once)
    own = _key(x)
    there = first + tl.arange(0, at_once) < tokens
    excluded = own < worst
    if ties_excluded > seen:
        tie = (there & (own == worst)).to(tl.int32)
        excluded |= (tie > 0) & (seen + tl.cumsum(tie, 0) <= ties_excluded)
        seen += tl.sum(tie, 0)
    excluded |= tl.exp(tl.maximum(x - peak, -28.0)) < min_p
    weight = tl.where(there & ~excluded, _weight_of(x, peak), 0)
    return tl.where(excluded, float("-inf"), x), weight, seen


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
