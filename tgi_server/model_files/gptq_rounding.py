"""Rounds a weight so that a layer's outputs change little: GPTQ (Frantar et al. 2022).

Inputs are rounded one after the other. The error of each is compensated by those that are not rounded yet, with the
inverse of the Hessian of the squared error, which is the sum of x x^T over calibration inputs x.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.weight import LINE, QuantizedWeight, paired

_BLOCK = 128  # inputs after which the rest of the weight is brought up to date
_MIN_SCALE = 1e-8
_ROWS_PER_THREAD = 512


@dataclass(frozen=True, slots=True)
class GptqSettings:
    """bits: bits of a quantized weight, stored in 4 or 8. group_size: inputs that share a scale; -1: all. damping: is
    added to the Hessian's diagonal, as a share of its mean. act_order: round inputs with the largest activations first.
    """

    bits: int = 4
    group_size: int = 128
    damping: float = 0.01
    act_order: bool = False


class Hessian:
    """The Hessian of a layer's squared error: [inputs, inputs] float32, summed up over calibration inputs."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self._sum = torch.zeros(inputs, inputs, device=device)
        self._rows = 0

    def add(self, x: Tensor) -> None:
        """Adds calibration inputs x, [..., inputs]."""
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self._sum.addmm_(rows.T, rows)
        self._rows += len(rows)

    def mean(self) -> Tensor:
        return self._sum / max(1, self._rows)


def round_weight(weight: Tensor, hessian: Tensor, settings: GptqSettings) -> QuantizedWeight:
    """Returns the rounded weight. weight: [outputs, inputs]; hessian: [inputs, inputs] float32."""
    inputs = weight.shape[1]
    size = settings.group_size if settings.group_size > 0 else inputs
    weight, hessian = weight.float().clone(), hessian.clone()
    unused = hessian.diagonal() == 0
    hessian.diagonal()[unused] = 1
    order = hessian.diagonal().argsort(descending=True) if settings.act_order else torch.arange(inputs)
    weight[:, unused] = 0
    weight, hessian = weight[:, order], hessian[order][:, order]
    factors = _inverse_factors(hessian, settings.damping)
    codes, scales, zeros = _round_rows(weight, factors, size, 2**settings.bits - 1)
    places = order.argsort()
    groups = places // size  # of each input, where the checkpoint has it
    if settings.bits <= 4:
        return QuantizedWeight.of(paired(codes[:, places].to(torch.uint8)), scales, zeros, codebook=LINE, groups=groups)
    signed = (codes[:, places] - 128).to(torch.int8)
    return QuantizedWeight.of(signed, scales, zeros - 128, groups=groups)


def _inverse_factors(hessian: Tensor, damping: float) -> Tensor:
    """Returns the upper Cholesky factor of the inverse, with more damping if rounding errors make it fail."""
    mean = hessian.diagonal().mean()
    while True:
        damped = hessian + torch.eye(len(hessian)) * (damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed:
                return upper
        damping *= 10


def _round_rows(weight: Tensor, factors: Tensor, size: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds a weight, which is changed, with a thread for each part of its outputs.

    Each of thousands of inputs takes some ten short operations, after each of which torch's own threads would
    mostly wait for each other. Outputs do not depend on each other.
    """
    threads = max(1, min(torch.get_num_threads(), len(weight) // _ROWS_PER_THREAD))
    with ThreadPoolExecutor(threads, "rounding", initializer=partial(torch.set_num_threads, 1)) as pool:
        parts = pool.map(lambda rows: _round_columns(rows, factors, size, largest), weight.chunk(threads))
        codes, scales, zeros = (torch.cat(each) for each in zip(*parts, strict=True))
    return codes, scales, zeros


@torch.inference_mode()
def _round_columns(weight: Tensor, factors: Tensor, size: int, largest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds the columns of a weight, which is changed. Returns codes, and scales and zeros, [outputs, groups]."""
    outputs, inputs = weight.shape
    codes = torch.empty_like(weight)
    count = -(-inputs // size)
    scales, zeros = torch.empty(outputs, count), torch.empty(outputs, count)
    for first in range(0, inputs, _BLOCK):
        last = min(first + _BLOCK, inputs)
        errors = torch.empty(outputs, last - first)
        for column in range(first, last):
            group = column // size
            if column % size == 0:
                scales[:, group], zeros[:, group] = _range(weight[:, column : column + size], largest)
            scale, zero, factor = scales[:, group], zeros[:, group], factors[column, column]
            codes[:, column] = (weight[:, column] / scale + zero).round_().clamp_(0, largest)
            error = (weight[:, column] - (codes[:, column] - zero) * scale) / factor
            weight[:, column:last] -= error.unsqueeze(1) * factors[column, column:last]
            errors[:, column - first] = error
        weight[:, last:] -= errors @ factors[first:last, last:]
    return codes, scales, zeros


def _range(group: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Returns scales and zeros with which a group's codes cover the range from its smallest to its largest weight.

    Scales are numbers of 16 bits, and zeros at least 1, because checkpoints store them so.
    """
    low, high = group.amin(1).clamp_(max=0), group.amax(1).clamp_(min=0)
    scales = ((high - low) / largest).half().float().clamp_(min=_MIN_SCALE)
    return scales, (-low / scales).round_().clamp_(1, largest)
