"""Conversion of numbers to FP8 codes and back, in Triton kernels.

Devices older than the Ada generation have no instructions for e4m3, so both directions are bit operations. A code is
decoded as the upper bits of a float16: e5m2 is just that, and e4m3 differs by a factor, since its bias is another one.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import triton
import triton.language as tl

E4M3_UNIT = tl.constexpr(256.0)


def unit(mantissa: int) -> float:
    """Returns the factor from a number that `decoded` returns to its true value; 1 for all but e4m3.

    mantissa: as in KVFormat.
    """
    return E4M3_UNIT.value if mantissa == 3 else 1.0


@triton.jit
def decoded(codes, mantissa: tl.constexpr):
    """Returns float16 numbers of uint8 codes: the numbers that the codes stand for, divided by `unit`."""
    bits = codes.to(tl.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7) if mantissa == 3 else bits << 8
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def encoded(x, scale, mantissa: tl.constexpr):
    """Returns the uint8 codes nearest to x / scale, computed in float32 and clamped to the largest number."""
    bias: tl.constexpr = 7 if mantissa == 3 else 15
    largest: tl.constexpr = 448.0 if mantissa == 3 else 57344.0
    smallest: tl.constexpr = 0.015625 if mantissa == 3 else 0.00006103515625  # of those with an exponent
    # Beyond this number floats are as far apart as the codes of smaller numbers.
    base: tl.constexpr = 16384.0 if mantissa == 3 else 128.0
    shift: tl.constexpr = 23 - mantissa
    bits = x.to(tl.int32, bitcast=True)
    # `/` is off by a bit on a GPU, which moves what lies between two codes
    size = tl.minimum(tl.div_rn(tl.abs(x), scale + tl.zeros_like(x)), largest)
    whole = size.to(tl.int32, bitcast=True)
    normal = ((whole + ((1 << (shift - 1)) - 1) + ((whole >> shift) & 1)) >> shift) - ((127 - bias) << mantissa)
    lifted = (size + base).to(tl.int32, bitcast=True) & ((1 << shift) - 1)
    code = tl.where(size < smallest, lifted, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
