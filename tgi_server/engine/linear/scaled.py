"""Linear layers in FP8 on GPUs that multiply such numbers, those of compute capability 8.9 and newer."""

from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.kernels.triton import variants
from tgi_server.engine.kernels.triton.few_rows import MOST_ROWS_FP8, arrivals, multiply_few
from tgi_server.engine.kernels.triton.rounding import Rounded, rounded, rounded_norm
from tgi_server.engine.linear.base import PackedQuantized
from tgi_server.engine.linear.kernel_table import KernelTable

# Rows are padded to this many, since torch's product takes a third longer for one row (on an H200).
_LEAST_ROWS = 16


class ScaledLinear(PackedQuantized):
    """y = x W^T + b with W in FP8 and x rounded to FP8: a scale for each output and row, or for each of their blocks.

    x and y are bfloat16, which is all that torch's product with such scales gives.
    """

    rounds_inputs = True

    def _pack(self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable | None) -> None:  # type: ignore[override]
        self._codes, self._scales = weight.codes.contiguous(), weight.scales.T.contiguous()
        self._bias = None if bias is None else bias.to(self.weight.dtype)
        self._wide_bias = None if bias is None else bias.float()
        if "few_rows" in variants():  # a kernel whose time is that of reading weights, so inputs keep their 16 bits
            self.few_rows, self._arrived = MOST_ROWS_FP8, arrivals(self.out_features, weight.codes.device)
        groups = len(self._scales)
        self._together = None if groups == 1 else self.in_features // groups

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        of_inputs = self._scales.T.repeat_interleave(self.in_features // len(self._scales), 1)
        return (self._codes.float() * of_inputs).to(self.weight.dtype), self._bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        if 0 < len(rows) <= self.few_rows:
            return self.fused(rows).view(*x.shape[:-1], self.out_features)
        y = self._product(rounded(rows, self._together, _LEAST_ROWS))
        return y[: len(rows)].view(*x.shape[:-1], self.out_features)

    def of_norm(
        self, x: Tensor, added: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        inputs, total = rounded_norm(x, added, weight, bias, eps, self._together, _LEAST_ROWS)
        return self._product(inputs)[: len(x)], total

    def of_activated(self, x: Tensor, activation: str, *, gated: bool) -> Tensor:
        return self._product(rounded(x, self._together, _LEAST_ROWS, activation, gated=gated))[: len(x)]

    def _product(self, inputs: Rounded) -> Tensor:
        """Returns y, [rows, out_features], for all rows of the inputs, padding included."""
        codes, scales = inputs
        # Fast accumulation keeps sums in the tensor cores, with fewer bits than float32 but more than inputs have. Sums
        # of blocks are scaled in float32, outside of the tensor cores.
        in_blocks = self._together is not None
        bias = None if in_blocks else self._bias
        y = torch._scaled_mm(
            codes, self._codes.t(), scales, self._scales, bias, out_dtype=torch.bfloat16, use_fast_accum=not in_blocks
        )
        if in_blocks and self._bias is not None:
            y += self._bias
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if 0 < len(x) <= self.few_rows:
            return self.fused(x, residual=residual.contiguous())
        return residual + self.forward(x)

    def fused(self, x: Tensor, residual: Tensor | None = None, **around: Any) -> Tensor:
        codes = self._codes.view(torch.uint8)
        return multiply_few(x, codes, self._scales, self._wide_bias, residual, self._arrived, **around)
