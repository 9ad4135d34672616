"""Random numbers and draws that depend only on a request's seed and on how many tokens it has generated.

The numbers of a generator with state would depend on when it is called, and so on the rest of the batch and on
preemptions. Here the number for token `step` is a hash of (seed, step), the same in any batch on any device: SplitMix64
(Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014) at position `step` of the sequence that
begins at the hash of the seed.

Sums of floats depend on the order of addition, and so on the device and on the number of rows in the batch. Sums of
integers do not. So all decisions between tokens (how many fill `top_p`, which one is drawn) use integers that are
proportional to probabilities, the tokens' weights. To get the same integers everywhere, the exponential is computed
here in steps that every device rounds in the same way; `kernels/cpu/sampling/` has the same steps.
"""

import torch
from torch import Tensor

# The likeliest token weighs 2**40, so 2**22 weights can be summed without overflow. A token 2**40 times less likely
# than the best weighs 0; float32 could not represent the difference either.
SCALE = 2.0**40
# Scores this far below the highest one, or further, have the weight 0.
_WEIGHTLESS = -28.0
_LOG2_E = 1.44269504
# Polynomial for 2^f, f from -0.5 to 0.5, with a relative error of 1e-7: highest power first, without the last term, 1.
_COEFFICIENTS = (0.00132647273, 0.00967151299, 0.0555073358, 0.240222424, 0.693147004)
# Adding x to a float32 this large rounds x to an integer, since no bits are left for fractions. The last bits of the
# sum are that integer plus 40.
_ROUNDS = 1.5 * 2**23 + 40
_BLOCK = 256


def as_int64(value: int) -> int:
    """Returns the int64 with the same 64 bits as the unsigned `value`; torch computes with signed integers only."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


_GOLDEN_GAMMA = as_int64(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = as_int64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = as_int64(0x94D049BB133111EB)


def mix64(bits: Tensor) -> Tensor:
    """Returns SplitMix64's finalizer, a bijective hash, of int64 of any shape."""
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST_MULTIPLIER
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND_MULTIPLIER
    return bits ^ _shift_right(bits, 31)


def uniform(seeds: Tensor, steps: Tensor) -> Tensor:
    """Returns numbers in [0, 1), float64 `[rows]`, for int64 `seeds` and `steps` `[rows]`."""
    bits = mix64(mix64(seeds + _GOLDEN_GAMMA) + steps * _GOLDEN_GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _shift_right(bits: Tensor, places: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask removes the copies of the sign.
    return (bits >> places) & (2 ** (64 - places) - 1)


def below_peak(scores: Tensor) -> Tensor:
    """Returns `scores` minus the maximum of their row, float32 `[rows, tokens]`: 0 for the likeliest token."""
    peak = scores.amax(-1, keepdim=True)
    # A row without any possible token stays a row of -inf instead of becoming NaN.
    return scores - peak.clamp_min(torch.finfo(scores.dtype).min)


def scaled_exponential(x: Tensor) -> Tensor:
    """Returns 2**40 * e^x with a relative error of 2e-6. x: float32, at most 0; less than -28 counts as -28."""
    powers = x.clamp_min(_WEIGHTLESS).mul_(_LOG2_E)
    whole = powers + _ROUNDS
    fraction = powers.sub_(whole - _ROUNDS)
    series = torch.full_like(fraction, _COEFFICIENTS[0])
    for coefficient in (*_COEFFICIENTS[1:], 1.0):
        series.mul_(fraction).add_(coefficient)
    return (series.view(torch.int32) + (whole.view(torch.int32) << 23)).view(torch.float32)


def token_weights(scores: Tensor) -> Tensor:
    """Returns int64 `[rows, tokens]` proportional to the softmax of `scores` float32 `[rows, tokens]`."""
    return scaled_exponential(below_peak(scores)).to(torch.int64)


def draw(scores: Tensor, numbers: Tensor) -> Tensor:
    """Draws a token for each row from softmax(scores), by inverting its cumulative distribution at `numbers`.

    scores: float32 `[rows, tokens]`; numbers: float64 `[rows]` in [0, 1). Returns int64 `[rows]`: the first token, in
    the vocabulary's order, at which the running sum of weights exceeds `number * sum`. Sums are computed per block
    first, and only the block that has the token is summed token by token.
    """
    weights = token_weights(scores)
    tokens = weights.shape[1]
    whole = tokens - tokens % _BLOCK
    blocks = weights[:, :whole].unflatten(1, (whole // _BLOCK, _BLOCK)).sum(2)
    if whole < tokens:
        blocks = torch.cat((blocks, weights[:, whole:].sum(1, keepdim=True)), dim=1)
    running = blocks.cumsum(1)
    total = running[:, -1]
    # Less than the sum despite rounding: a number is at most 1 - 2**-53, and the sum is less than 2**63.
    aim = (numbers * total.to(torch.float64)).to(torch.int64).unsqueeze(1)
    block = (running <= aim).sum(1, keepdim=True).clamp_max_(blocks.shape[1] - 1)
    aim = aim - (running - blocks).gather(1, block)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=scores.device)
    within = weights.gather(1, ids.clamp_max(tokens - 1)).masked_fill_(ids >= tokens, 0).cumsum(1)
    token = block * _BLOCK + (within <= aim).sum(1, keepdim=True)
    return token.squeeze(1).clamp_max_(tokens - 1)
