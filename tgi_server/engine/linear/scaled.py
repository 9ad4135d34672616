"""Linear layers in FP8 on GPUs that multiply such numbers, those of compute capability 8.9 and newer."""

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.kernels.triton.fp8 import rounded
from tgi_server.engine.linear.base import PackedQuantized
from tgi_server.engine.linear.kernel_table import KernelTable

# For one row torch's product takes longer than for this many: on an H200 by a third.
_LEAST_ROWS = 16


class ScaledLinear(PackedQuantized):
    """y = x W^T + b with W in FP8 and x rounded to FP8: a scale for each output and row, or for each of their blocks.

    x and y are bfloat16, which is all that torch's product with such scales gives.
    """

    def _pack(self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable | None) -> None:  # type: ignore[override]
        self._codes, self._scales = weight.codes.contiguous(), weight.scales.T.contiguous()
        self._bias = None if bias is None else bias.to(self.weight.dtype)
        groups = len(self._scales)
        self._together = None if groups == 1 else self.in_features // groups

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        of_inputs = self._scales.T.repeat_interleave(self.in_features // len(self._scales), 1)
        return (self._codes.float() * of_inputs).to(self.weight.dtype), self._bias

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        codes, scales = rounded(rows, self._together, _LEAST_ROWS)
        # Sums stay in the tensor cores, of whose bits they have fewer than float32; inputs have fewer still. Those of
        # blocks leave them to be scaled.
        in_blocks = self._together is not None
        bias = None if in_blocks else self._bias
        y = torch._scaled_mm(
            codes, self._codes.t(), scales, self._scales, bias, out_dtype=x.dtype, use_fast_accum=not in_blocks
        )
        if in_blocks and self._bias is not None:
            y += self._bias
        return y[: len(rows)].view(*x.shape[:-1], self.out_features)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self.forward(x)
