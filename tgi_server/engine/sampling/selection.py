"""Finding the value at which sorted weights add up to a target, without sorting.

Radix selection: a histogram of the values' leading bits says in which bin the target is reached, a second
histogram of the next bits of that bin's values narrows it down, a third one finds the value itself. Three passes
over the vocabulary, each in linear time, in place of a sort.
"""

from typing import NamedTuple

import torch
from torch import Tensor

_DIGITS = ((21, 11), (10, 11), (0, 10))  # (lowest bit, number of bits), highest digit first
_SIGN = -(2**31)


class Threshold(NamedTuple):
    """value: float32 `[rows, 1]`; below and at: int64 `[rows, 1]`, what the values below it and equal to it weigh."""

    value: Tensor
    below: Tensor
    at: Tensor


def weighted_threshold(values: Tensor, weights: Tensor, target: Tensor) -> Threshold:
    """The smallest value such that the weights of all values up to it reach the target.

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
    """int32 whose unsigned order is the order of the float32 values. Adding zero makes one zero of the two."""
    bits = (values + 0.0).view(torch.int32)
    # Negative floats grow in magnitude with their bits: all bits are turned round. Others get the sign bit.
    return bits ^ ((bits >> 31) | _SIGN)


def _values_of_keys(keys: Tensor) -> Tensor:
    return (keys ^ (~(keys >> 31) | _SIGN)).view(torch.float32)


def _as_int32(bits: Tensor) -> Tensor:
    """The lower 32 bits of int64 as int32."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
