"""Parts that all attention in plain torch shares: masks, and pieces of work that take a bounded amount of memory."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.base import AttentionVariant

# Maximum number of elements of an intermediate tensor. Attention that would take more is computed in pieces.
_ELEMENTS_AT_ONCE = 1 << 27


def pieces(rows: int, elements: int) -> Iterator[slice]:
    """Yields pieces of some rows, each with at most this many intermediate elements, but with at least one row."""
    at_once = max(1, _ELEMENTS_AT_ONCE // max(1, elements))
    for first in range(0, rows, at_once):
        yield slice(first, min(first + at_once, rows))


def scores_mask(
    positions: Tensor, keys: Tensor, variant: AttentionVariant, like: Tensor, ends: Tensor | None = None
) -> Tensor:
    """Returns the tensor to add to the scores: [sequences, heads or 1, queries, keys], -inf for hidden keys.

    positions: [sequences, queries] position of each query; keys: [keys] position of each key. ends: [sequences,
    queries], the keys up to which each query attends; None: up to its own position.
    """
    distance = positions.unsqueeze(-1) - keys
    hidden = distance < 0 if ends is None else keys >= ends.unsqueeze(-1)
    if variant.window:
        hidden |= distance >= variant.window
    if variant.chunk:
        hidden |= keys < (positions // variant.chunk * variant.chunk).unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
    if variant.alibi_slopes is None:
        return mask.unsqueeze(1)
    slopes = variant.alibi_slopes[:, None, None]
    if variant.rounded_alibi:
        bias = (slopes.bfloat16() * keys.bfloat16()).float() * variant.scaling
    else:
        bias = slopes * keys.float()
    return mask.unsqueeze(1) + bias.to(like.dtype)
