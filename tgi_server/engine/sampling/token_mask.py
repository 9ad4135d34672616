"""Which tokens a grammar allows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenMask:
    """bits: int32 `[masked, words]` on the device, token i allowed by bit i % 32 of word i // 32.

    positions: which row of the logits each of the masks belongs to. Tokens past the last word are forbidden.
    """

    bits: Tensor
    positions: Sequence[int]


def forbid(scores: Tensor, bits: Tensor) -> Tensor:
    """Sets the scores of tokens whose bit is 0 to minus infinity: `[rows, vocab]`, `[rows, words]`."""
    # Bytes are unpacked rather than words: a quarter of the memory. All platforms of torch are little-endian.
    octets = bits.contiguous().view(torch.uint8).unsqueeze(2)
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    forbidden = ((octets & powers) == 0).flatten(1)[:, : scores.shape[1]]
    known = forbidden.shape[1]
    scores[:, :known].masked_fill_(forbidden, -torch.inf)
    scores[:, known:] = -torch.inf
    return scores
