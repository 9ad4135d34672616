"""Linear layers with 8-bit weights, one scale for each output."""

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.rounding import ROUNDED_AT_ONCE, rounded_to_bytes
from tgi_server.engine.linear.float import FloatLinear, packed_in_parts
from tgi_server.engine.linear.kernel_linear import padded
from tgi_server.engine.linear.kernel_table import KernelTable

INPUT_ZERO_POINT = 128  # as in kernels/cpu/gemm/microkernel.h


class Int8Linear(FloatLinear):
    """y = x W^T + b with W rounded to 8 bits, a scale for each output, and x rounded to 8 bits, a scale for each row.

    Accumulators are exact; the result has the dtype of x.
    """

    rounding = 0.3

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        packed, (scales, sums) = packed_in_parts(weight, ROUNDED_AT_ONCE, _rounded)
        self._scales = padded(scales)
        known, compensation = torch.ops.oatmill.linear_kernels(packed), padded(sums * INPUT_ZERO_POINT)
        self._set(packed, bias, kernels, known, scales=self._scales, compensation=compensation)

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        rounded, bias = super()._dense()
        return (rounded * self._scales[: self.out_features, None]).to(self.weight.dtype), bias


def _rounded(weight: Tensor) -> tuple[Tensor, ...]:
    """Returns rows of a weight as bytes, their scales and their sums."""
    rounded, scales = rounded_to_bytes(weight.float())
    return rounded, scales, rounded.sum(1, dtype=torch.int32)  # int64 takes torch some 20 times as long
