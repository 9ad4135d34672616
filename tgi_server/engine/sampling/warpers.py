"""The rules that shape what is sampled from: temperature, top_k, top_p, typical_p, min_p.

Each takes scores float32 `[rows, tokens]` and one value per row `[rows, 1]`, may overwrite the scores, and returns
them with excluded tokens at minus infinity. Each excludes the same tokens as the class of its name in
`transformers.generation.logits_process`, ties included.
"""

import torch
from torch import Tensor

from tgi_server.engine.sampling.selection import weighted_threshold
from tgi_server.engine.sampling.weights import below_peak, fixed_point, token_weights

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
        worst_kept = -weighted_threshold(-scores, ones, counts.squeeze(1))
    return scores.masked_fill_(scores < worst_kept, -torch.inf)


def top_p(scores: Tensor, masses: Tensor) -> Tensor:
    """Keeps the best tokens until their probabilities add up to `masses` (float64).

    Of tokens that are equally likely, only as many are kept as it takes, those with the highest ids.
    """
    weights = token_weights(scores)
    target = _share(weights, masses)
    worst_kept = -weighted_threshold(-scores, weights, target)
    better = scores > worst_kept
    missing = target - torch.where(better, weights, 0).sum(1)
    ties = scores == worst_kept
    weight_of_one = torch.where(ties, weights, 0).amax(1).clamp_min_(1)
    ties_kept = (missing + weight_of_one - 1) // weight_of_one
    rank = ties.cumsum(1, dtype=torch.int32)
    first_kept = rank[:, -1:] - ties_kept.unsqueeze(1)
    return scores.masked_fill_(~(better | (ties & (rank > first_kept))), -torch.inf)


def typical_p(scores: Tensor, masses: Tensor) -> Tensor:
    """Keeps the tokens whose surprise is nearest to the expected one until they add up to `masses` (float64).

    Meister et al., "Locally Typical Sampling", 2022.
    """
    relative = below_peak(scores)
    weights = fixed_point(relative.exp())
    surprise = relative.neg_()  # less that of the likeliest token, which cancels out below
    expected = fixed_point(torch.where(weights > 0, surprise.neg().exp_() * surprise, 0.0)).sum(1)
    mean = expected.to(torch.float64) / weights.sum(1).clamp_min(1)
    distance = (surprise - mean.to(torch.float32).unsqueeze(1)).abs_()
    farthest_kept = weighted_threshold(distance, weights, _share(weights, masses))
    return scores.masked_fill_(distance > farthest_kept, -torch.inf)


def min_p(scores: Tensor, shares: Tensor) -> Tensor:
    """Keeps the tokens that are at least `shares` (float32) times as likely as the likeliest."""
    return scores.masked_fill_(below_peak(scores).exp_() < shares, -torch.inf)


def _share(weights: Tensor, masses: Tensor) -> Tensor:
    """The weight that makes up `masses` `[rows, 1]` of each row, rounded up, at least 1: int64 `[rows]`."""
    total = weights.sum(1)
    share = (total.to(torch.float64) * masses.squeeze(1)).ceil_().to(torch.int64)
    return share.clamp_min_(1).minimum(total)
