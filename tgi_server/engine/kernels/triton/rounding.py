"""Rounds inputs of FP8 products, with a scale for each row or for each group of its inputs. Kernels in Triton also
compute the norm or the gate before the product.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier
from tgi_server.engine.kernels.triton.fp8 import encoded
from tgi_server.engine.kernels.triton.norm_and_gate import activated, normalised, warps_of

# Most inputs that a program rounds together, and those of a warp. A row that is rounded in parts waits for memory twice
# for each of them.
_AT_ONCE, _OF_WARP = 8192, 512

# Numbers in e4m3, and the scales to multiply them by, [rows, groups] float32. Scales of several groups are transposed:
# those of a group are neighbours.
Rounded = tuple[Tensor, Tensor]


def rounded(
    x: Tensor, together: int | None = None, least_rows: int = 1, activation: str = "", *, gated: bool = False
) -> Rounded:
    """Rounds x, [rows, inputs], or the result of `norm_and_gate.activate` for it, in the dtype of x.

    together: number of inputs that share a scale, which divides a row's length. None: all of a row. least_rows: minimum
    rows of the result; additional rows are uninitialised. activation: "" for none.
    """
    x = x.contiguous()
    rows, inputs = len(x), x.shape[1] // 2 if gated else x.shape[1]
    codes, scales = _empty(x, inputs, together, least_rows)
    size, groups = together or inputs, scales.shape[1]
    at_once = min(_AT_ONCE, triton.next_power_of_2(size))
    warps = max(1, at_once // _OF_WARP)
    _round_row[rows, groups](
        x, codes, scales, size, len(codes), at_once=at_once, activation=activation, gated=gated, num_warps=warps,
        **launch_options(x.device),
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


def rounded_norm(
    x: Tensor,
    added: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    together: int | None = None,
    least_rows: int = 1,
) -> tuple[Rounded, Tensor]:
    """Rounds x, [rows, inputs], after its norm, and after rounding that to the dtype of x. Returns x, too.

    added: a tensor in the shape of x that is added to x first, or None. weight, bias: as in `norm_and_gate`; with a
    bias it is a layer norm. together, least_rows: as in `rounded`; `together` is a power of two.
    """
    x = x.contiguous()
    rows, size = x.shape
    codes, scales = _empty(x, size, together, least_rows)
    width, total = triton.next_power_of_2(size), x if added is None else torch.empty_like(x)
    _round_norm[rows,](
        x, None if added is None else added.contiguous(), total, weight, bias, codes, scales, eps, len(codes),
        size=size, width=width, together=together or 0, num_warps=warps_of(width), **launch_options(x.device),
    )  # fmt: skip
    return (codes.view(torch.float8_e4m3fn), scales), total


def _empty(x: Tensor, inputs: int, together: int | None, least_rows: int) -> Rounded:
    rows, groups = max(len(x), least_rows), 1 if together is None else inputs // together
    codes = torch.empty(rows, inputs, dtype=torch.uint8, device=x.device)
    shape = (rows, 1), (1, 1)  # torch's product reads the stride, though there is one number in each row
    if groups > 1:
        shape = (rows, groups), (1, rows)
    return codes, torch.empty_strided(*shape, dtype=torch.float32, device=x.device)


@triton.jit
def _scale_of(largest):
    return tl.maximum(largest / 448.0, 1e-30)


@triton.jit
def _input(x, column, real, inputs, activation: tl.constexpr, gated: tl.constexpr):
    """Returns some inputs of a row in float32. inputs: number of inputs of a row, without its gate."""
    value = tl.load(x + column, mask=real, other=0.0).to(tl.float32)
    kind: tl.constexpr = x.dtype.element_ty
    if activation != "":
        value = activated(value, activation)
        if gated:
            up = tl.load(x + inputs + column, mask=real, other=0.0).to(tl.float32)
            value = value.to(kind).to(tl.float32) * up
        value = tl.where(real, value.to(kind).to(tl.float32), 0.0)
    return value


@triton.jit(do_not_specialize=["rows"])
def _round_row(
    x, codes, scales, size, rows, at_once: tl.constexpr, activation: tl.constexpr, gated: tl.constexpr,
    pdl: tl.constexpr = False,
):  # fmt: skip
    if pdl:
        wait_for_earlier()
    groups = tl.num_programs(1)
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * size
    inputs = groups * size
    own_x = x + row * (2 * inputs if gated else inputs) + first
    own_codes = codes + row * inputs + first
    place = tl.arange(0, at_once)
    largest = tl.zeros([at_once], tl.float32)
    for start in range(0, size, at_once):
        own = _input(own_x, start + place, start + place < size, inputs, activation, gated)
        largest = tl.maximum(largest, tl.abs(own))
    scale = _scale_of(tl.max(largest, 0))
    tl.store(scales + tl.program_id(1) * rows + tl.program_id(0), scale)
    for start in range(0, size, at_once):
        real = start + place < size
        own = _input(own_x, start + place, real, inputs, activation, gated)
        tl.store(own_codes + start + place, encoded(own, scale, 3), mask=real)


@triton.jit(do_not_specialize=["rows"])
def _round_norm(
    x, added, total, weight, bias, codes, scales, eps, rows,
    size: tl.constexpr, width: tl.constexpr, together: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    if pdl:
        wait_for_earlier()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    real = column < size
    kind: tl.constexpr = x.dtype.element_ty
    values = tl.load(x + row * size + column, mask=real, other=0.0).to(tl.float32)
    if added is not None:
        values += tl.load(added + row * size + column, mask=real, other=0.0).to(tl.float32)
        tl.store(total + row * size + column, values.to(kind), mask=real)
        values = values.to(kind).to(tl.float32)
    values = normalised(values, weight, bias, eps, column, size, bias is not None, kind).to(kind).to(tl.float32)
    values = tl.where(real, values, 0.0)
    if together == 0:
        scale = _scale_of(tl.max(tl.abs(values), 0))
        tl.store(scales + row, scale)
        tl.store(codes + row * size + column, encoded(values, scale, 3), mask=real)
    else:
        groups: tl.constexpr = width // together
        blocks = tl.reshape(values, (groups, together))
        group, place = tl.arange(0, groups), tl.arange(0, together)
        scale = _scale_of(tl.max(tl.abs(blocks), 1))
        tl.store(scales + group * rows + row, scale, mask=group < size // together)
        place = group[:, None] * together + place[None, :]
        tl.store(codes + row * size + place, encoded(blocks, scale[:, None], 3), mask=place < size)
