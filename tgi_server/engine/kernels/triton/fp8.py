"""Numbers of 8 bits with an exponent, in Triton kernels: to codes and back.

Devices older than the Ada generation have no instructions for e4m3, so both directions are bit operations. A code is
read by way of a half, which both kinds are the upper bits of, or would be with another bias.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3_UNIT = tl.constexpr(256.0)
# Most inputs that a program rounds together, and those of a warp. A row that is rounded in parts waits for memory twice
# for each of them.
_AT_ONCE, _OF_WARP = 8192, 512


def unit(mantissa: int) -> float:
    """Returns what a number as `decoded` returns it is multiplied by; 1 where numbers are not of 8 bits.

    mantissa: as in KVFormat.
    """
    return E4M3_UNIT.value if mantissa == 3 else 1.0


@triton.jit
def decoded(codes, mantissa: tl.constexpr):
    """Returns float16 numbers of uint8 codes, each the `unit`th part of what its code stands for."""
    bits = codes.to(tl.uint16)
    bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7) if mantissa == 3 else bits << 8
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def encoded(x, scale, mantissa: tl.constexpr):
    """Returns the uint8 codes nearest to x / scale, float32; of what is too large that of the largest number."""
    bias: tl.constexpr = 7 if mantissa == 3 else 15
    largest: tl.constexpr = 448.0 if mantissa == 3 else 57344.0
    smallest: tl.constexpr = 0.015625 if mantissa == 3 else 0.00006103515625  # of those with an exponent
    # Behind this number floats are as far apart as the codes of smaller numbers.
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


def rounded(x: Tensor, together: int | None = None, least_rows: int = 1) -> tuple[Tensor, Tensor]:
    """Rounds x, [rows, inputs]. Returns e4m3 numbers, and the scales to multiply by, [rows, groups] float32.

    together: inputs that share a scale; a row's length is a multiple of it. None: all of a row. Scales of several
    groups are transposed: those of a group are neighbours. least_rows: of what is returned; rows that x does not have
    are uninitialised.
    """
    size, rows = together or x.shape[1], max(len(x), least_rows)
    groups = x.shape[1] // size
    codes = torch.empty(rows, x.shape[1], dtype=torch.uint8, device=x.device)
    shape = (rows, 1), (1, 1)  # torch's product reads the stride, though there is one number in each row
    if groups > 1:
        shape = (rows, groups), (1, rows)
    scales = torch.empty_strided(*shape, dtype=torch.float32, device=x.device)
    at_once = min(_AT_ONCE, triton.next_power_of_2(size))
    warps = max(1, at_once // _OF_WARP)
    _round_row[len(x), groups](x, codes, scales, size, rows, at_once=at_once, num_warps=warps)
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit(do_not_specialize=["rows"])
def _round_row(x, codes, scales, size, rows, at_once: tl.constexpr):
    groups = tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * groups + tl.program_id(1)
    place = tl.arange(0, at_once)
    largest = tl.zeros([at_once], tl.float32)
    for start in range(0, size, at_once):
        own = tl.load(x + row * size + start + place, mask=start + place < size, other=0.0)
        largest = tl.maximum(largest, tl.abs(own.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0) / 448.0, 1e-30)
    tl.store(scales + tl.program_id(1) * rows + tl.program_id(0), scale)
    for start in range(0, size, at_once):
        real = start + place < size
        own = tl.load(x + row * size + start + place, mask=real, other=0.0)
        tl.store(codes + row * size + start + place, encoded(own.to(tl.float32), scale, 3), mask=real)
