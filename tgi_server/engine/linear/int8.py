"""Linear layers with 8-bit weights, one scale for each output."""

from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.float import PackedLinear, padded

LEVELS = 127
INPUT_OFFSET = 128  # as in kernels/int8.h


class Int8Linear(PackedLinear):
    """y = x W^T + b with W rounded to 8 bits, a scale for each output, and x rounded to 8 bits, a scale for each row.

    Sums are exact; the result has the dtype of x.
    """

    rounding = 0.3

    @staticmethod
    def supported() -> bool:
        """Returns True if this CPU has the instructions."""
        return load_kernels() and bool(torch.ops.oatmill.int8_supported())

    def _pack(self, weight: Tensor, bias: Tensor | None) -> None:
        rounded, scales, sums = rounded_to_bytes(weight)
        self._scales = padded(scales)
        self._corrections = padded(sums * INPUT_OFFSET)
        self._packed = torch.ops.oatmill.int8_pack(rounded)
        self._bias = None if bias is None else padded(bias)

    def kernel(self) -> Any:
        return torch.classes.oatmill.Linear(
            self._packed, self.out_features, self._bias, self._scales, self._corrections
        )

    def forward(self, x: Tensor, activation: str = "none") -> Tensor:
        return self._multiply(x, activation == "relu", None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._multiply(x, False, residual)

    def _multiply(self, x: Tensor, relu: bool, residual: Tensor | None) -> Tensor:
        return torch.ops.oatmill.int8_linear(
            x, self._packed, self.out_features, self._scales, self._corrections, self._bias, relu, residual
        )


def rounded_to_bytes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rounds a weight, [outputs, inputs], to 8 bits.

    Returns the int8 numbers; for each output the float32 scale that they have to be multiplied by; and the sum of each
    output's int8 numbers, in float32.
    """
    weight = weight.float()
    scales = weight.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny) / LEVELS
    rounded = (weight / scales.unsqueeze(1)).round_()
    return rounded.to(torch.int8), scales, rounded.sum(1)
