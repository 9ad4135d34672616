"""The rules that shape what is sampled from: temperature, top_k, top_p, typical_p, min_p.

Each takes scores float32 `[rows, tokens]` and one value per row `[rows, 1]`, may overwrite the scores, and returns
them with excluded tokens at minus infinity. Each excludes the same tokens as the class of its name in
`transformers.generation.logits_process`, ties included.
"""

import torch
from torch import Tensor

from tgi_server.engine.sampling.selection import weighted_threshold
from tgi_server.engine.sampling.weights import WEIGHTLESS, below_peak, fixed_point, token_weights

# Above it, selection without sorting is cheaper than `torch.topk`.
LARGEST_SORTED_TOP_K = 512


def temperature(scores: Tensor, temperatures: Tensor) -> Tensor:
    return scores.div_(temperatures)


def top_k(scores: Tensor, counts: Tensor, largest: int) -> Tensor:
    """Keeps the `counts` (int64) best tokens, and those equal to the last of them. largest: the highest count."""
    if largest <= LARGEST_SORTED_TOP_K:
        worst_kept = scores.topk(largest).values.gather(1, counts - 1)
    else:
        ones = torch.ones((), dtype=torch.int64, device=scores.device).expand_as(scores)
        worst_kept = -weighted_threshold(-scores, ones, counts).value
    return scores.masked_fill_(scores < worst_kept, -torch.inf)


def top_p(scores: Tensor, masses: Tensor) -> Tensor:
    """Keeps the best tokens until their probabilities add up to `masses` (float64).

    Of tokens that are equally likely, only as many are kept as it takes, those with the highest ids.
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
    """Keeps the tokens whose surprise is nearest to the expected one until they add up to `masses` (float64).

    Meister et al., "Locally Typical Sampling", 2022.
    """
    surprise = below_peak(scores).neg_()  # less that of the likeliest token, which cancels out below
    likelihood = surprise.neg().clamp_min_(WEIGHTLESS).exp_()
    expected = likelihood * surprise
    weights = fixed_point(likelihood)
    expected = fixed_point(torch.where(weights > 0, expected, 0.0)).sum(1, keepdim=True)
    mean = expected.to(torch.float64) / weights.sum(1, keepdim=True).clamp_min_(1)
    distance = (surprise - mean.to(torch.float32)).abs_()
    farthest_kept = weighted_threshold(distance, weights, _share(weights, masses)).value
    return scores.masked_fill_(distance > farthest_kept, -torch.inf)


def min_p(scores: Tensor, shares: Tensor) -> Tensor:
    """Keeps the tokens that are at least `shares` (float32) times as likely as the likeliest."""
    return scores.masked_fill_(below_peak(scores).clamp_min_(WEIGHTLESS).exp_() < shares, -torch.inf)


def _share(weights: Tensor, masses: Tensor) -> Tensor:
    """The weight that makes up `masses` `[rows, 1]` of each row, rounded up, at least 1: int64 `[rows, 1]`."""
    total = weights.sum(1, keepdim=True)
    share = (total.to(torch.float64) * masses).ceil_().to(torch.int64)
    return share.clamp_min_(1).minimum(total)
