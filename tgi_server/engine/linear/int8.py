"""Linear layers with 8-bit weights, one scale for each output."""

import torch
from torch import Tensor

from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.kernel_linear import padded
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.quantization.rounding import rounded_to_bytes

INPUT_OFFSET = 128  # UNSIGNED_OFFSET of kernels/products.h


class Int8Linear(FloatLinear):
    """y = x W^T + b with W rounded to 8 bits, a scale for each output, and x rounded to 8 bits, a scale for each row.

    Sums are exact; the result has the dtype of x.
    """

    rounding = 0.3

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        rounded, scales = rounded_to_bytes(weight.float())
        self._scales = padded(scales)
        packed = torch.ops.oatmill.linear_pack(rounded)
        known, corrections = torch.ops.oatmill.linear_kernels(packed), padded(rounded.sum(1) * INPUT_OFFSET)
        self._set(packed, bias, kernels, known, scales=self._scales, corrections=corrections)

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        rounded, bias = super()._dense()
        return (rounded * self._scales[: self.out_features, None]).to(self.weight.dtype), bias
