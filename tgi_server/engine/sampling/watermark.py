"""A watermark in generated text, and its detector.

Kirchenbauer et al., "A Watermark for Large Language Models", 2023: each token divides the vocabulary into a green
and a red part, and the scores of green tokens are raised before the next token is chosen. Text that was generated
so has more green tokens than chance allows; finding out takes neither the model nor the prompt.

The paper shuffles the vocabulary with a generator seeded by the token before. Here a token is green when a hash of
the key, the token before and itself falls in the lower `gamma` of its range: all rows at once and without state. A
green list is then `gamma` of the vocabulary on average, not to the token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tgi_server.engine.sampling.random import as_int64, mix64


@dataclass(frozen=True, slots=True)
class WatermarkSettings:
    """gamma: share of the vocabulary that is green; delta: what is added to its scores; key: who can detect it."""

    gamma: float = 0.5
    delta: float = 2.0
    key: int = 15485863

    def __post_init__(self) -> None:
        if not 0.0 < self.gamma < 1.0:
            raise ValueError(f"watermark gamma is a share of the vocabulary, between 0 and 1, not {self.gamma}")


@dataclass(frozen=True, slots=True)
class WatermarkScore:
    """z: standard deviations above chance; p: how likely chance alone gives so many green tokens."""

    z: float
    p: float
    green: int
    total: int


def is_green(previous: Tensor, token_ids: Tensor, settings: WatermarkSettings) -> Tensor:
    """Whether `token_ids` are green after `previous`: int64 tensors that broadcast together."""
    context = mix64(previous + as_int64(settings.key << 32))
    fraction = mix64(context ^ token_ids) & 0xFFFFFFFF
    return fraction < int(settings.gamma * 2**32)


def raise_green(scores: Tensor, previous: Tensor, settings: WatermarkSettings) -> Tensor:
    """Adds delta to the green tokens' scores: float32 `[rows, vocab]`, after the tokens `previous` int64 `[rows]`."""
    vocabulary = torch.arange(scores.shape[1], device=scores.device)
    return scores.add_(is_green(previous.unsqueeze(1), vocabulary, settings) * settings.delta)


def detect(token_ids: Sequence[int], settings: WatermarkSettings) -> WatermarkScore:
    """Tests `token_ids` for the watermark of `settings`.

    Each pair of neighbours counts once however often it occurs, since a repeated pair is no new evidence. With the
    last token of the prompt in front, the first generated token is counted too.
    """
    pairs = sorted(set(pairwise(token_ids)))
    if not pairs:
        return WatermarkScore(z=0.0, p=1.0, green=0, total=0)
    previous, following = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    green, total = int(is_green(previous, following, settings).sum()), len(pairs)
    spread = math.sqrt(total * settings.gamma * (1 - settings.gamma))
    z = (green - settings.gamma * total) / spread
    return WatermarkScore(z=z, p=0.5 * math.erfc(z / math.sqrt(2)), green=green, total=total)
