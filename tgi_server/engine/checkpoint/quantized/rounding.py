"""Rounds the weights of an unquantised checkpoint as they are read, one tensor after the other."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_server.engine.checkpoint.quantized.source import Files, QuantizedTensor
from tgi_server.engine.checkpoint.quantized.weight import LINE, QuantizedWeight, paired

Rounding = Callable[[Tensor], QuantizedWeight]

# Inputs of a group of int4, and weights of a block of nf4 and fp4.
GROUP = 64
# Numbers of a weight that are in float32 at a time, while it is read.
ROUNDED_AT_ONCE = 1 << 20
_INT4_LARGEST = 15
_INT8_LARGEST = 127
_FP8_LARGEST = 448.0
_TINY = torch.finfo(torch.float32).tiny

# Quantiles of the normal distribution, from appendix E of QLoRA (Dettmers et al. 2023).
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Floats of 4 bits as bitsandbytes has them: 2 bits of exponent and 1 of mantissa, scaled to end at 1.
_FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
_FP4 = (*_FP4_MAGNITUDES, *(-magnitude for magnitude in _FP4_MAGNITUDES))


def rounded_to_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a weight, [outputs, inputs] float32, to 8 bits.

    Returns the int8 numbers, and the float32 scale of each output, by which its numbers are multiplied.
    """
    scales = (weight.abs().amax(1) / _INT8_LARGEST).clamp_(min=_TINY)
    return (weight / scales.unsqueeze(1)).round_().to(torch.int8), scales


def _int8(weight: Tensor) -> QuantizedWeight:
    numbers, scales = rounded_to_bytes(weight)
    return QuantizedWeight.of(numbers, scales.unsqueeze(1))


def _fp8(weight: Tensor) -> QuantizedWeight:
    scales = (weight.abs().amax(1, keepdim=True) / _FP8_LARGEST).clamp(min=_TINY)
    numbers = (weight / scales).clamp_(-_FP8_LARGEST, _FP8_LARGEST)
    return QuantizedWeight.of(numbers.to(torch.float8_e4m3fn), scales)


def _grouped(weight: Tensor) -> Tensor:
    """Returns [outputs, groups, GROUP], with zeros after the last input."""
    return pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _groups(inputs: int) -> Tensor:
    return torch.arange(inputs) // GROUP


def _int4(weight: Tensor) -> QuantizedWeight:
    groups = _grouped(weight)
    low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
    scales = ((high - low) / _INT4_LARGEST).clamp_(min=_TINY).bfloat16().float()  # of 16 bits: a kernel reads them
    zeros = (-low / scales).round_()
    codes = (groups / scales.unsqueeze(2)).round_().add_(zeros.unsqueeze(2)).clamp_(0, _INT4_LARGEST)
    flat = codes.to(torch.uint8).flatten(1)[:, : weight.shape[1]]
    return QuantizedWeight.of(paired(flat), scales, zeros, codebook=LINE, groups=_groups(weight.shape[1]))


def _by_codebook(codebook: Sequence[float], weight: Tensor) -> QuantizedWeight:
    numbers, codes = torch.tensor(codebook).sort()
    groups = _grouped(weight)
    scales = groups.abs().amax(2).clamp_(min=_TINY)
    places = torch.bucketize(groups / scales.unsqueeze(2), (numbers[1:] + numbers[:-1]) / 2)
    flat = codes[places].to(torch.uint8).flatten(1)[:, : weight.shape[1]]
    return QuantizedWeight.of(paired(flat), scales, codebook=torch.tensor(codebook), groups=_groups(weight.shape[1]))


# By the value of --quantize: a description of the weights, and the function that rounds one, [outputs, inputs] float32.
ROUNDINGS: dict[str, tuple[str, Rounding]] = {
    "bitsandbytes": ("rounded to 8 bits", _int8),
    "bitsandbytes-fp4": (f"rounded to fp4, blocks of {GROUP}", partial(_by_codebook, _FP4)),
    "bitsandbytes-nf4": (f"rounded to nf4, blocks of {GROUP}", partial(_by_codebook, _NF4)),
    "eetq": ("rounded to 8 bits", _int8),
    "fp8": ("rounded to FP8", _fp8),
    "int4": (f"rounded to 4 bits, groups of {GROUP}", _int4),
    "int8": ("rounded to 8 bits", _int8),
}


# The ends of the names of tensors that have the weights of all experts of a layer.
STACKED = (".experts.gate_up_proj", ".experts.down_proj")


def sources(files: Files, rounding: Rounding) -> list[QuantizedTensor]:
    """Returns a quantised tensor for every matrix of a checkpoint, and for every tensor of all experts of a layer."""
    found: list[QuantizedTensor] = []
    for name, file in files.items():
        shape = tuple(file.get_shape())
        if (name.endswith(".weight") and len(shape) == 2) or (name.endswith(STACKED) and len(shape) == 3):
            weights = partial(_rounded_weights, file, rounding)
            found.append(QuantizedTensor(name, files, (name,), shape, weights))
    return found


def _rounded_weights(file: Any, rounding: Rounding) -> Iterator[QuantizedWeight]:
    shape = file.get_shape()
    matrices = [file[...]] if len(shape) == 2 else (file[expert].T for expert in range(shape[0]))
    for weight in matrices:
        parts = weight.split(max(1, ROUNDED_AT_ONCE // weight.shape[1]))
        yield QuantizedWeight.joined([rounding(part.float()) for part in parts])
