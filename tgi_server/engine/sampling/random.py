"""Random numbers that are a function of a request's seed and of how many tokens it has generated.

A generator with state gives a request numbers that depend on when it was called, so on the rest of the batch
and on preemptions. Here the number for token `step` is a hash of (seed, step), which any batch on any device
computes alike: SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014) read
at position `step` of the sequence that begins at the hash of the seed.
"""

import torch
from torch import Tensor


def as_int64(value: int) -> int:
    """The int64 with the same 64 bits as the unsigned `value`; torch computes with signed integers only."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


_GOLDEN_GAMMA = as_int64(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = as_int64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = as_int64(0x94D049BB133111EB)


def mix64(bits: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 of any shape: a bijection in which each input bit sways each output bit."""
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST_MULTIPLIER
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND_MULTIPLIER
    return bits ^ _shift_right(bits, 31)


def uniform(seeds: Tensor, steps: Tensor) -> Tensor:
    """Numbers in [0, 1), float64 `[rows]`, for int64 `seeds` and `steps` `[rows]`."""
    bits = mix64(mix64(seeds + _GOLDEN_GAMMA) + steps * _GOLDEN_GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def _shift_right(bits: Tensor, places: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask removes the copies of the sign.
    return (bits >> places) & (2 ** (64 - places) - 1)
