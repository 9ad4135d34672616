"""Probabilities as integers.

Sums of floats depend on the order of addition, and that order depends on the device and on the number of rows in
the batch. Sums of integers do not. All decisions between tokens (how many fill `top_p`, which one is drawn) are
taken on these weights, so they are the same in any batch.
"""

import torch
from torch import Tensor

# The likeliest token weighs 2**40, so 2**22 tokens can be added up without overflow, and what rounds to zero (a
# token 2**40 times less likely than the best) could not be told apart in float32 either.
SCALE = 2.0**40
# Its exponential rounds to a weight of zero, as does that of all below it. On a CPU exp(-inf) takes five times as long.
WEIGHTLESS = -28.0


def below_peak(scores: Tensor) -> Tensor:
    """`scores` less the highest of their row, float32 `[rows, tokens]`: 0 for the likeliest token."""
    peak = scores.amax(-1, keepdim=True)
    # A row without any possible token stays a row of -inf instead of becoming NaN.
    return scores - peak.clamp_min(torch.finfo(scores.dtype).min)


def fixed_point(numbers: Tensor) -> Tensor:
    """Non-negative float numbers not above 1, times SCALE, rounded down to int64. Overwrites `numbers`."""
    return numbers.mul_(SCALE).to(torch.int64)


def token_weights(scores: Tensor) -> Tensor:
    """int64 `[rows, tokens]` proportional to the softmax of `scores` float32 `[rows, tokens]`."""
    return fixed_point(below_peak(scores).clamp_min_(WEIGHTLESS).exp_())
