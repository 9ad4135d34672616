"""The logits warpers: temperature, top_k, top_p, typical_p, min_p.

Each takes scores, float32 `[rows, tokens]`, and one value per row, `[rows, 1]`, may overwrite the scores, and returns
them with excluded tokens at minus infinity. Each excludes the same tokens as the class of its name in
`transformers.generation.logits_process`, ties included.

None of them sorts all scores. The value at which sorted weights would add up to a target is found by radix selection: a
histogram of the values' leading bits shows in which bin the target is reached, a second histogram of the next bits of
that bin's values narrows it down, and a third one finds the value. Each takes one pass over the vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tgi_server.engine.sampling.random import SCALE, below_peak, scaled_exponential, token_weights

# For a larger top_k, radix selection is cheaper than `torch.topk`.
LARGEST_SORTED_TOP_K = 512
_DIGITS = ((21, 11), (10, 11), (0, 10))  # (lowest bit, number of bits), highest digit first
_SIGN = -(2**31)


def temperature(scores: Tensor, temperatures: Tensor) -> Tensor:
    return scores.div_(temperatures).clamp_max_(torch.finfo(scores.dtype).max)


def top_k(scores: Tensor, counts: Tensor, largest: int) -> Tensor:
    """Keeps the `counts` (int64) best tokens, and those equal to the last of them. largest: maximum of `counts`."""
    if largest <= LARGEST_SORTED_TOP_K:
        worst_kept = scores.topk(largest).values.gather(1, counts - 1)
    else:
        ones = torch.ones((), dtype=torch.int64, device=scores.device).expand_as(scores)
        worst_kept = -weighted_threshold(-scores, ones, counts).value
    return scores.masked_fill_(scores < worst_kept, -torch.inf)


def top_p(scores: Tensor, masses: Tensor) -> Tensor:
    """Keeps the best tokens until their probabilities add up to `masses` (float64).

    Among equally likely tokens, only as many as needed are kept, those with the highest ids.
    """
    weights = token_weights(scores)
    target = _share(weights, masses)
    threshold = weighted_threshold(-scores, weights, target)
    worst_kept = -threshold.value
    ties = scores == worst_kept
    rank = ties.cumsum(1, dtype=torch.int32)
    weight_of_one = (threshold.at // rank[:, -1:].clamp_min(1)).clamp_min_(1)
    ties_kept = (target - threshold.below + weight_of_one - 1) // weight_of_one
    excluded = (scores < worst_kept) | (ties & (rank <= rank[:, -1:] - ties_kept))
    return scores.masked_fill_(excluded, -torch.inf)


def typical_p(scores: Tensor, masses: Tensor) -> Tensor:
    """Keeps the tokens whose surprisal is nearest to its mean until their probabilities add up to `masses` (float64).

    Meister et al., "Locally Typical Sampling", 2022.
    """
    surprise = below_peak(scores).neg_()  # minus the surprisal of the likeliest token, which cancels out below
    likelihood = scaled_exponential(-surprise)
    weights = likelihood.to(torch.int64)
    expected = torch.where(weights > 0, likelihood * surprise, 0.0).to(torch.int64).sum(1, keepdim=True)
    mean = expected.to(torch.float64) / weights.sum(1, keepdim=True).clamp_min_(1)
    distance = (surprise - mean.to(torch.float32)).abs_()
    farthest_kept = weighted_threshold(distance, weights, _share(weights, masses)).value
    return scores.masked_fill_(distance > farthest_kept, -torch.inf)


def min_p(scores: Tensor, shares: Tensor) -> Tensor:
    """Keeps the tokens that are at least `shares` (float32) times as likely as the likeliest."""
    return scores.masked_fill_(scaled_exponential(below_peak(scores)) < shares * SCALE, -torch.inf)


def _share(weights: Tensor, masses: Tensor) -> Tensor:
    """Returns `masses` times the sum of each row's weights, rounded up, at least 1: int64 `[rows, 1]`."""
    total = weights.sum(1, keepdim=True)
    share = (total.to(torch.float64) * masses).ceil_().to(torch.int64)
    return share.clamp_min_(1).minimum(total)


class Threshold(NamedTuple):
    """A value, float32 `[rows, 1]`, and the sums of the weights below it and at it, int64 `[rows, 1]`."""

    value: Tensor
    below: Tensor
    at: Tensor


def weighted_threshold(values: Tensor, weights: Tensor, target: Tensor) -> Threshold:
    """Returns the smallest value such that the weights of all values up to it add up to the target or more.

    values: float32 `[rows, tokens]`; weights: int64, non-negative, same shape; target: int64 `[rows, 1]`, between 1
    and the sum of the row's weights.
    """
    keys = _ordered_keys(values)
    chosen = torch.zeros_like(target)
    below = torch.zeros_like(target)
    for lowest, bits in _DIGITS:
        digits = ((keys >> lowest) & (2**bits - 1)).to(torch.int64)
        higher = lowest + bits
        inside = weights if higher == 32 else torch.where(keys >> higher == _as_int32(chosen) >> higher, weights, 0)
        bins = torch.zeros(keys.shape[0], 2**bits, dtype=torch.int64, device=keys.device)
        bins.scatter_add_(1, digits, inside)
        reached = below + bins.cumsum(1)
        digit = (reached < target).sum(1, keepdim=True).clamp_max_(2**bits - 1)
        at = bins.gather(1, digit)
        below = reached.gather(1, digit) - at
        chosen = chosen | (digit << lowest)
    return Threshold(_values_of_keys(_as_int32(chosen)), below, at)


def _ordered_keys(values: Tensor) -> Tensor:
    """Returns int32 whose unsigned order is the order of the float32 values."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0
    # The bits of negative floats grow with their magnitude, so all of them are inverted. Others get the sign bit.
    return bits ^ ((bits >> 31) | _SIGN)


def _values_of_keys(keys: Tensor) -> Tensor:
    return (keys ^ (~(keys >> 31) | _SIGN)).view(torch.float32)


def _as_int32(bits: Tensor) -> Tensor:
    """Returns the lower 32 bits of int64 as int32."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
