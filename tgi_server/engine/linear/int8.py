"""Linear layers with 8-bit weights, one scale for each output."""

import torch
from torch import Tensor

from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.kernel_linear import padded
from tgi_server.engine.linear.kernel_table import KernelTable

LEVELS = 127
INPUT_OFFSET = 128  # UNSIGNED_OFFSET of kernels/products.h


class Int8Linear(FloatLinear):
    """y = x W^T + b with W rounded to 8 bits, a scale for each output, and x rounded to 8 bits, a scale for each row.

    Sums are exact; the result has the dtype of x.
    """

    rounding = 0.3

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        rounded, scales, sums = rounded_to_bytes(weight)
        self._scales = padded(scales)
        packed = torch.ops.oatmill.linear_pack(rounded)
        known, corrections = torch.ops.oatmill.linear_kernels(packed), padded(sums * INPUT_OFFSET)
        self._set(packed, bias, kernels, known, scales=self._scales, corrections=corrections)

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        rounded, bias = super()._dense()
        return (rounded * self._scales[: self.out_features, None]).to(self.weight.dtype), bias


def rounded_to_bytes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds a weight, [outputs, inputs], to 8 bits.

    Returns the int8 numbers; for each output the float32 scale that they have to be multiplied by; and the sum of each
    output's int8 numbers, in float32.
    """
    weight = weight.float()
    scales = weight.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / LEVELS
    rounded = (weight / scales.unsqueeze(1)).round_()
    return rounded.to(torch.int8), scales, rounded.sum(1)
