"""The logits processors: a grammar's mask, the watermark, and penalties for tokens that have occurred already.

They apply to greedy requests, too, and come before the warpers. Scores are float32 `[rows, vocab]`; a penalty gets
counts, int32 of the same shape, and one value per row, `[rows, 1]`.

Watermark: Kirchenbauer et al., "A Watermark for Large Language Models", 2023. Each token divides the vocabulary into a
green and a red part, and the scores of green tokens are raised before the next token is chosen. Text generated in this
way has more green tokens than chance explains; detecting it needs neither the model nor the prompt. The paper shuffles
the vocabulary with a generator seeded by the previous token. Here a token is green if a hash of the key, the previous
token and itself is in the lower `gamma` of its range, which needs no state and works on all rows at once. So `gamma` is
the green share of the vocabulary on average, not exactly.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from tgi_server.engine.memory import to_device
from tgi_server.engine.sampling.random import as_int64, mix64


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that grammars allow.

    bits: int32 `[masks, words]` on the device; bit i % 32 of word i // 32 allows token i. Tokens past the last word are
    forbidden. positions: the row of the logits of each mask.
    """

    bits: Tensor
    positions: Sequence[int]

    def apply(self, logits: Tensor) -> None:
        """Sets the logits of forbidden tokens to minus infinity: `[rows, vocab]` in any float type."""
        if list(self.positions) == list(range(len(logits))):
            _forbid(logits, self.bits)
            return
        rows = to_device(self.positions, torch.int64, logits.device)
        logits.index_copy_(0, rows, _forbid(logits.index_select(0, rows), self.bits))


def _forbid(scores: Tensor, bits: Tensor) -> Tensor:
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
    """Returns the maximum scores of the eight tokens of each byte value, infinity or minus infinity: `[256, 8]`."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)
    return torch.where(bits & 1 == 1, torch.inf, -torch.inf).to(dtype)


@dataclass(frozen=True, slots=True)
class WatermarkSettings:
    """Settings of the watermark.

    gamma: share of the vocabulary that is green. delta: what is added to the scores of green tokens. key: secret that
    is needed to detect the watermark.
    """

    gamma: float = 0.5
    delta: float = 2.0
    key: int = 15485863

    def __post_init__(self) -> None:
        if not 0.0 < self.gamma < 1.0:
            raise ValueError(f"watermark gamma is a share of the vocabulary, between 0 and 1, not {self.gamma}")


@dataclass(frozen=True, slots=True)
class WatermarkScore:
    """The evidence for a watermark.

    z: standard deviations above chance. p: probability of at least as many green tokens by chance. green: number of
    green tokens among `total`.
    """

    z: float
    p: float
    green: int
    total: int


def is_green(previous: Tensor, token_ids: Tensor, settings: WatermarkSettings) -> Tensor:
    """Returns a bool tensor: True for `token_ids` that are green after `previous`, both int64, broadcast together."""
    context = mix64(previous + as_int64(settings.key << 32))
    fraction = mix64(context ^ token_ids) & 0xFFFFFFFF
    return fraction < int(settings.gamma * 2**32)


def raise_green(scores: Tensor, previous: Tensor, settings: WatermarkSettings) -> Tensor:
    """Adds delta to the scores of green tokens, in place. scores: float32 `[rows, vocab]`. previous: int64 `[rows]`."""
    vocabulary = torch.arange(scores.shape[1], device=scores.device)
    return scores.add_(is_green(previous.unsqueeze(1), vocabulary, settings) * settings.delta)


def detect(token_ids: Sequence[int], settings: WatermarkSettings) -> WatermarkScore:
    """Tests `token_ids` for the watermark of `settings`.

    Each pair of neighbours counts once, since a repeated pair is not new evidence. To count the first generated token
    as well, put the last token of the prompt in front.
    """
    pairs = sorted(set(pairwise(token_ids)))
    if not pairs:
        return WatermarkScore(z=0.0, p=1.0, green=0, total=0)
    previous, following = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    green, total = int(is_green(previous, following, settings).sum()), len(pairs)
    spread = math.sqrt(total * settings.gamma * (1 - settings.gamma))
    z = (green - settings.gamma * total) / spread
    return WatermarkScore(z=z, p=0.5 * math.erfc(z / math.sqrt(2)), green=green, total=total)


def repetition_penalty(scores: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Divides positive scores of tokens that have occurred by the penalty, and multiplies negative ones by it.

    Keskar et al., "CTRL", 2019. Prompt and generated tokens count, as in transformers.
    """
    penalised = torch.where(scores < 0, scores * penalties, scores / penalties)
    return torch.where(counts > 0, penalised, scores)


def frequency_penalty(scores: Tensor, counts: Tensor, penalties: Tensor, lengths: Tensor) -> Tensor:
    """Subtracts the penalty times the token's share of the text so far, as TGI does.

    The share, not the count: occurrences divided by `lengths`, the number of prompt and generated tokens, `[rows, 1]`.
    """
    return scores.sub_(counts / lengths.clamp_min(1) * penalties)


def presence_penalty(scores: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Subtracts the penalty once from every token that has been generated, as OpenAI's API defines it."""
    return scores.sub_((counts > 0) * penalties)


def count_penalty(scores: Tensor, counts: Tensor, penalties: Tensor) -> Tensor:
    """Subtracts the penalty as often as the token has been generated: OpenAI's `frequency_penalty`."""
    return scores.sub_(counts * penalties)


class TokenCounts:
    """A pool of token counts, one vector per slot. It is empty at first, and doubles when all slots are taken."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)  # [slots, vocab]
        self._free: list[int] = []

    def take(self, token_ids: Sequence[int]) -> int:
        """Takes a slot, and counts `token_ids` in it. Ids beyond the vocabulary are ignored. Returns the slot."""
        slots, vocab_size = self.counts.shape
        if not self._free:
            grown = max(1, slots)
            self.counts = torch.cat((self.counts, self.counts.new_zeros(grown, vocab_size)))
            self._free.extend(reversed(range(slots, slots + grown)))
        slot = self._free.pop()
        row = self.counts[slot].zero_()
        ids = to_device([i for i in token_ids if i < vocab_size], torch.int64, self.counts.device)
        row.scatter_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def record(self, slots: Tensor, token_ids: Tensor, amounts: Tensor) -> None:
        """Adds `amounts` to the counts of `token_ids` in `slots`. All int64 `[rows]`."""
        places = slots * self.counts.shape[1] + token_ids
        self.counts.view(-1).scatter_add_(0, places, amounts.to(torch.int32))
