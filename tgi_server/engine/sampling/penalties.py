"""What makes tokens less likely because they have occurred already.

Each takes scores float32 `[rows, vocab]`, counts int32 of the same shape and one penalty per row `[rows, 1]`.
"""

import torch
from torch import Tensor


def repetition_penalty(scores: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Divides the positive scores of tokens that have occurred, and multiplies the negative ones.

    Keskar et al., "CTRL", 2019; counts are of prompt and generated tokens, as in transformers.
    """
    penalised = torch.where(scores < 0, scores * penalties, scores / penalties)
    return torch.where(counts > 0, penalised, scores)


def frequency_penalty(scores: Tensor, counts: Tensor, penalties: Tensor, lengths: Tensor) -> Tensor:
    """Takes off the penalty times the token's share of the text so far.

    The share, not the count, is what TGI multiplies with, over prompt and generated tokens. lengths: tokens of the
    text so far `[rows, 1]`.
    """
    return scores.sub_(counts / lengths.clamp_min(1) * penalties)


def presence_penalty(scores: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Takes off the penalty once from every token that has been generated, as OpenAI's API defines it."""
    return scores.sub_((counts > 0) * penalties)
