"""Slopes of attention with linear biases (Press et al. 2022)."""

import math

import torch
from torch import Tensor, nn

from tgi_server.engine.parallel.shares import Share


def slopes_of(attention: nn.Module, heads: int, kind: str) -> Tensor:
    """Returns the slopes of the heads that an attention module computes, which may be a shard's: [heads] float32.

    kind: `alibi` of LayerSpec.
    """
    slopes = interleaved_slopes if kind == "interleaved" else geometric_slopes
    share = getattr(attention, "share", None)
    if isinstance(share, Share):
        own = slopes(share.heads.queries)[share.queries.start : share.queries.stop]
    else:
        own = slopes(heads)
    return own.bfloat16().float() if kind == "rounded" else own


def geometric_slopes(heads: int) -> Tensor:
    """Returns 2^(-8/n), 2^(-16/n), ... for n heads: [heads] float32.

    If n is not a power of two: the slopes of the next smaller power of two, then every other slope of the next larger.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = _powers(power, torch.arange(1, power + 1))
    if power == heads:
        return slopes
    return torch.cat([slopes, _powers(2 * power, torch.arange(1, 2 * (heads - power), 2))])


def interleaved_slopes(heads: int, bias_max: float = 8) -> Tensor:
    """Returns 2^(-bias_max/n), 2^(-2*bias_max/n), ... for n heads: [heads] float32.

    If n is not a power of two: of the slopes of the next larger power of two, first every second one, then the others.
    """
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 1.0 / torch.pow(2, torch.arange(1, power + 1).float() * (bias_max / power))
    if power == heads:
        return slopes
    return torch.cat([slopes[1::2], slopes[::2]])[:heads]


def _powers(heads: int, exponents: Tensor) -> Tensor:
    base = torch.tensor(2 ** -(2 ** -(math.log2(heads) - 3)), dtype=torch.float32)
    return torch.pow(base, exponents.to(torch.int32))
