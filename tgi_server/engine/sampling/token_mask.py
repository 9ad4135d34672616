"""Which tokens a grammar allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenMask:
    """bits: int32 `[masked, words]` on the device, token i allowed by bit i % 32 of word i // 32.

    positions: which row of the logits each of the masks belongs to. Tokens past the last word are forbidden.
    """

    bits: Tensor
    positions: Sequence[int]

    def part(self, members: Sequence[bool]) -> "TokenMask | None":
        """Some of the masks; None when there are none."""
        chosen = [i for i, member in enumerate(members) if member]
        if len(chosen) == len(self.positions):
            return self
        positions = [self.positions[i] for i in chosen]
        return TokenMask(self.bits[chosen], positions) if chosen else None


def forbid(scores: Tensor, bits: Tensor) -> Tensor:
    """Sets the scores of tokens whose bit is 0 to minus infinity: `[rows, vocab]`, `[rows, words]`."""
    # Bytes are looked up rather than words, and all platforms of torch are little-endian.
    octets = bits.contiguous().view(torch.uint8).flatten().to(torch.int32)
    limits = _limits(scores.device, scores.dtype).index_select(0, octets).view(len(bits), -1)[:, : scores.shape[1]]
    known = limits.shape[1]
    torch.minimum(scores[:, :known], limits, out=scores[:, :known])
    scores[:, known:] = -torch.inf
    return scores


@cache
def _limits(device: torch.device, dtype: torch.dtype) -> Tensor:
    """For each byte of bits, the most that its eight tokens may score: `[256, 8]`."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)
    return torch.where(bits & 1 == 1, torch.inf, -torch.inf).to(dtype)
