"""The work between a decoder layer's products on a GPU, one Triton kernel for each: norms, and activations."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.kernels.triton.dependent_launch import launch_options, wait_for_earlier

_ACTIVATED_AT_ONCE = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, factor: float = 1.0) -> Tensor:
    """Returns x, [..., size], divided by the root mean square of each row and times weight, [size].

    weight: in the dtype of x, or in float32; then the product is rounded once. residual: in the shape of x; the result
    is residual + factor * normed x.
    """
    return _normalise(x, weight, weight, eps, residual, factor, centred=False)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """Returns x, [..., size], with each row's mean at 0 and its deviation at 1, times weight, plus bias, [size].

    residual, factor: as in `rms_norm`.
    """
    return _normalise(x, weight, bias, eps, residual, factor, centred=True)


def warps_of(width: int) -> int:
    """Returns how many warps a program has for a row of so many elements."""
    return 4 if width <= 2048 else 8


def _normalise(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Tensor | None, factor: float, *, centred: bool
) -> Tensor:
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        x = x.contiguous()
    size = x.shape[-1]
    output = x.new_empty(x.shape)
    width = triton.next_power_of_2(size)
    heads, strides = 1, (size, 0)
    if not x.is_contiguous():  # such as queries beside keys, of heads each
        heads, strides = (1, (x.stride(0), 0)) if x.dim() == 2 else (x.shape[1], (x.stride(0), x.stride(1)))
    _norm[x.numel() // size,](
        x, weight, bias, None if residual is None else residual.contiguous(), output, *strides, eps, factor,
        heads=heads, size=size, width=width, centred=centred, num_warps=warps_of(width), **launch_options(x.device),
    )  # fmt: skip
    return output


def activate(x: Tensor, activation: str, *, gated: bool) -> Tensor:
    """Returns activation(x), [rows, size]; or, gated, activation(gate) * up of x, [rows, 2 * size], the gate first.

    activation: one of Activation in models/spec.py.
    """
    x = x.contiguous()
    rows, width = x.shape
    size = width // 2 if gated else width
    output = x.new_empty(rows, size)
    _activate[rows, triton.cdiv(size, _ACTIVATED_AT_ONCE)](
        x, output, size, at_once=_ACTIVATED_AT_ONCE, activation=activation, gated=gated, num_warps=4,
        **launch_options(x.device),
    )  # fmt: skip
    return output


@triton.jit
def _norm(
    x, weight, bias, residual, output, x_row, x_head, eps, factor,
    heads: tl.constexpr, size: tl.constexpr, width: tl.constexpr, centred: tl.constexpr, pdl: tl.constexpr = False,
):  # fmt: skip
    """A program has one row; with strides of heads, one head of one."""
    if pdl:
        wait_for_earlier()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, width)
    real = column < size
    kind: tl.constexpr = output.dtype.element_ty
    own_x = x + row // heads * x_row + row % heads * x_head
    values = tl.load(own_x + column, mask=real, other=0.0).to(tl.float32)
    values = normalised(values, weight, bias, eps, column, size, centred, kind)
    if residual is not None:  # what is added has been rounded
        values = (values.to(kind).to(tl.float32) * factor).to(kind).to(tl.float32)
        values += tl.load(residual + row * size + column, mask=real, other=0.0).to(tl.float32)
    tl.store(output + row * size + column, values.to(kind), mask=real)


@triton.jit
def normalised(values, weight, bias, eps, column, size: tl.constexpr, centred: tl.constexpr, kind: tl.constexpr):
    """Returns a row, float32, normalised and multiplied by the weight. kind: the dtype of the input."""
    real = column < size
    if centred:
        values = tl.where(real, values - tl.sum(values, 0) / size, 0.0)
    values = values * tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    scale = tl.load(weight + column, mask=real, other=0.0)
    if centred:
        values = values * scale.to(tl.float32) + tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    else:
        if scale.dtype != tl.float32:  # `transformers` rounds before it multiplies
            values = values.to(kind).to(tl.float32)
        values = values * scale.to(tl.float32)
    return values


@triton.jit
def _activate(
    x, output, size, at_once: tl.constexpr, activation: tl.constexpr, gated: tl.constexpr,
    pdl: tl.constexpr = False,
):  # fmt: skip
    if pdl:
        wait_for_earlier()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * at_once + tl.arange(0, at_once)
    real = column < size
    own = x + row * (2 * size if gated else size)
    value = activated(tl.load(own + column, mask=real, other=0.0).to(tl.float32), activation)
    if gated:  # `transformers` rounds what comes of the gate before it multiplies
        up = tl.load(own + size + column, mask=real, other=0.0).to(tl.float32)
        value = value.to(output.dtype.element_ty).to(tl.float32) * up
    tl.store(output + row * size + column, value.to(output.dtype.element_ty), mask=real)


@triton.jit
def activated(value, activation: tl.constexpr):
    """Returns activation(value); both are float32."""
    if activation == "relu":
        value = tl.maximum(value, 0.0)
    elif activation == "relu2":
        value = tl.maximum(value, 0.0) * tl.maximum(value, 0.0)
    elif activation == "gelu":
        value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))  # the root of 1 / 2
    elif activation == "gelu_tanh":  # the number is the root of 2 / pi
        value = value / (1.0 + tl.exp(-2.0 * 0.7978845608028654 * (value + 0.044715 * value * value * value)))
    else:
        value = value / (1.0 + tl.exp(-value))
    return value
