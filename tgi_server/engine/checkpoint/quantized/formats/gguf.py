"""The types of llama.cpp's quantised weights: blocks of 32 inputs, or of 256 with a scale for each 16 or 32 of them.

A row consists of blocks, each with its own scales: https://github.com/ggml-org/ggml, ggml-common.h. The
values are those of llama.cpp, to the last bit in float32. Types that are not in TYPES can only be dequantized.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.weight import CODES, LINE, BlockScales, QuantizedWeight, Scales, paired

# The codebooks of IQ4_NL and IQ4_XS, and of MXFP4; the latter has doubled numbers, for which scales are halved.
_NONLINEAR = torch.tensor([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113.0])
_DOUBLED_FP4 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12.0])
_SHIFTS = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)


def quantized_weight(kind: str, blocks: Tensor) -> QuantizedWeight:
    """Returns the weight of blocks, [outputs, blocks, bytes] uint8, of one of TYPES."""
    return TYPES[kind](blocks)


def _floats(blocks: Tensor, first: int, count: int = 1) -> Tensor:
    """Returns float16 numbers that begin at a byte of each block, in float32: [outputs, blocks, count]."""
    return blocks[..., first : first + 2 * count].contiguous().view(torch.float16).float()


def _nibbles(stored: Tensor) -> Tensor:
    """Returns codes in pairs of neighbours; stored: [..., n], the low halves of n bytes first, then the high ones."""
    even, odd = stored[..., ::2], stored[..., 1::2]
    return torch.cat(((even & 15) | (odd << 4), (even >> 4) | (odd & 0xF0)), -1)


def _single_nibbles(stored: Tensor) -> Tensor:
    """Returns numbers of 4 bits, which are stored in pairs, with a byte for each."""
    return torch.cat((stored & 15, stored >> 4), -1)


def _bits(stored: Tensor, places: int) -> Tensor:
    """Returns bit after bit of bytes, [..., n]: [..., places, n]."""
    return (stored.unsqueeze(-2) >> torch.arange(places, dtype=torch.uint8).unsqueeze(1)) & 1


def _four_bits(
    codes: Tensor, scales: Scales, zero: int = 0, offsets: Scales | None = None, codebook: Tensor = LINE
) -> QuantizedWeight:
    """Returns a weight with the same zero in all groups. codes: in pairs."""
    weight = QuantizedWeight.of(codes.flatten(1), _by_output(scales), codebook=codebook)
    return _with_offsets(replace(weight, zeros=torch.full_like(weight.scales, zero) if zero else None), offsets)


def _eight_bits(codes: Tensor, scales: Scales, offsets: Scales | None = None) -> QuantizedWeight:
    return _with_offsets(QuantizedWeight.of(codes.flatten(1).view(torch.int8), _by_output(scales)), offsets)


def _six_bits(codes: Tensor, scales: Scales, offsets: Scales | None = None) -> QuantizedWeight:
    """Returns a weight whose codes, each in a byte of its own, have 5 or 6 bits."""
    return replace(_eight_bits(codes, scales, offsets), six_bits=True)


def _by_output(scales: Scales) -> Scales:
    """Returns values of blocks as matrices, [outputs, ...]."""
    if isinstance(scales, BlockScales):
        return BlockScales(scales.blocks.flatten(1), scales.factors.flatten(1))
    return scales.flatten(1)


def _with_offsets(weight: QuantizedWeight, offsets: Scales | None) -> QuantizedWeight:
    """Returns the weight with offsets. Where one stands beside a scale of 0, the codes become 0."""
    if offsets is None:
        return weight
    weight = replace(weight, stored_offsets=_by_output(offsets))
    if isinstance(weight.stored_scales, BlockScales) and not weight.stored_scales.has_zeros:
        return weight
    assert weight.offsets is not None
    alone = (weight.scales == 0) & (weight.offsets != 0)
    if bool(alone.any()):
        codes = weight.codes.reshape(*alone.shape, -1).masked_fill(alone.unsqueeze(-1), 0)
        weight = replace(weight, codes=codes.flatten(1))
    return weight


def _q4_0(blocks: Tensor) -> QuantizedWeight:
    return _four_bits(_nibbles(blocks[..., 2:]), _floats(blocks, 0), CODES // 2)


def _q4_1(blocks: Tensor) -> QuantizedWeight:
    return _four_bits(_nibbles(blocks[..., 4:]), _floats(blocks, 0), offsets=_floats(blocks, 2))


def _q5_0(blocks: Tensor) -> QuantizedWeight:
    return _six_bits(_fifth_bit(blocks[..., 2:]) - 16, _floats(blocks, 0))


def _q5_1(blocks: Tensor) -> QuantizedWeight:
    return _six_bits(_fifth_bit(blocks[..., 4:]), _floats(blocks, 0), _floats(blocks, 2))


def _fifth_bit(stored: Tensor) -> Tensor:
    """Returns codes of five bits. stored: four bytes with the fifth bits, then the other bits."""
    high = _bits(stored[..., :4], 8).transpose(-1, -2).flatten(-2)
    return _single_nibbles(stored[..., 4:]) | (high << 4)


def _q8_0(blocks: Tensor) -> QuantizedWeight:
    return _eight_bits(blocks[..., 2:], _floats(blocks, 0))


def _q2_k(blocks: Tensor) -> QuantizedWeight:
    packed = blocks[..., :16]
    scale, least = _floats(blocks, 80, 2).split(1, -1)
    scales = BlockScales(scale, (packed & 15).to(torch.int8))
    offsets = BlockScales(-least, (packed >> 4).to(torch.int8))
    return _four_bits(_paired(_two_bits(blocks[..., 16:80])), scales, offsets=offsets)


def _q3_k(blocks: Tensor) -> QuantizedWeight:
    low = _two_bits(blocks[..., 32:96])
    high = _bits(blocks[..., :32], 8).flatten(-2)
    packed = blocks[..., 96:108]
    fours = _single_nibbles(packed[..., :8])
    twos = (packed[..., 8:].unsqueeze(-2) >> _SHIFTS.unsqueeze(1)).flatten(-2) & 3
    factors = (fours | (twos << 4)).to(torch.int8) - 32
    return _four_bits(_paired(low | (high << 2)), BlockScales(_floats(blocks, 108), factors), 4)


def _two_bits(stored: Tensor) -> Tensor:
    """Returns codes of two bits: from each 32 bytes the ones in the lowest bits first."""
    return ((stored.unflatten(-1, (-1, 1, 32)) >> _SHIFTS.unsqueeze(1)) & 3).flatten(-3)


def _q4_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _six_bit_scales(blocks)
    return _four_bits(_nibbles(blocks[..., 16:].unflatten(-1, (-1, 32))), scales, offsets=offsets)


def _q5_k(blocks: Tensor) -> QuantizedWeight:
    scales, offsets = _six_bit_scales(blocks)
    low = _single_nibbles(blocks[..., 48:].unflatten(-1, (-1, 32))).flatten(-2)
    return _six_bits(low | (_bits(blocks[..., 16:48], 8).flatten(-2) << 4), scales, offsets)


def _six_bit_scales(blocks: Tensor) -> tuple[BlockScales, BlockScales]:
    """Returns scales and offsets of Q4_K and Q5_K, whose six bits stand in three times four bytes."""
    scale, least = _floats(blocks, 0, 2).split(1, -1)
    first, second, rest = blocks[..., 4:16].split(4, -1)
    factors = torch.cat((first & 63, (rest & 15) | ((first >> 2) & 48)), -1)
    subtracted = torch.cat((second & 63, (rest >> 4) | ((second >> 2) & 48)), -1)
    return BlockScales(scale, factors.to(torch.int8)), BlockScales(-least, subtracted.to(torch.int8))


def _q6_k(blocks: Tensor) -> QuantizedWeight:
    low = _single_nibbles(blocks[..., :128].unflatten(-1, (-1, 64))).flatten(-2)
    codes = (low | (_two_bits(blocks[..., 128:192]) << 4)) - 32
    factors = blocks[..., 192:208].contiguous().view(torch.int8)
    return _six_bits(codes, BlockScales(_floats(blocks, 208), factors))


def _iq4_nl(blocks: Tensor) -> QuantizedWeight:
    return _four_bits(_nibbles(blocks[..., 2:]), _floats(blocks, 0), codebook=_NONLINEAR)


def _iq4_xs(blocks: Tensor) -> QuantizedWeight:
    high = (blocks[..., 2:4].unsqueeze(-1) >> _SHIFTS).flatten(-2) & 3
    fours = blocks[..., 4:8]
    low = torch.stack((fours & 15, fours >> 4), -1).flatten(-2)
    factors = (low | (high << 4)).to(torch.int8) - 32
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (-1, 16)))
    return _four_bits(codes, BlockScales(_floats(blocks, 0), factors), codebook=_NONLINEAR)


def _mxfp4(blocks: Tensor) -> QuantizedWeight:
    exponents = blocks[..., :1].int()
    scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 128)
    return _four_bits(_nibbles(blocks[..., 1:]), scales, codebook=_DOUBLED_FP4)


def _paired(codes: Tensor) -> Tensor:
    return paired(codes.flatten(1))


TYPES: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
}
