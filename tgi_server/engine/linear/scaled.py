"""Linear layers in FP8 on GPUs that multiply such numbers, those of compute capability 8.9 and newer."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# (arguments of kernels are what Triton makes of them)

import torch
import triton
import triton.language as tl
from torch import Tensor

from tgi_server.engine.linear.base import PackedCodes
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.quantization import QuantizedWeight
from tgi_server.engine.quantization.fp8 import encoded

_AT_ONCE = 1024


class ScaledLinear(PackedCodes):
    """y = x W^T + b with W in FP8, a scale for each output, and x rounded to FP8, a scale for each row.

    x and y are bfloat16, which is all that torch's product with a scale for each row gives.
    """

    def _pack(self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable | None) -> None:  # type: ignore[override]
        self._codes, self._scales = weight.codes.contiguous(), weight.scales.T.contiguous()
        self._bias = None if bias is None else bias.to(self.weight.dtype)

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        return (self._codes.float() * self._scales.T).to(self.weight.dtype), self._bias

    def forward(self, x: Tensor, activation: str = "none") -> Tensor:
        codes, scales = rounded(x.reshape(-1, self.in_features).contiguous())
        y = torch._scaled_mm(codes, self._codes.t(), scales, self._scales, self._bias, out_dtype=x.dtype)
        y = y.view(*x.shape[:-1], self.out_features)
        return torch.relu_(y) if activation == "relu" else y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self.forward(x)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds x, [rows, inputs]. Returns e4m3 numbers, and for each row the scale to multiply by, [rows, 1] float32."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    _round_row[len(x),](x, codes, scales, x.shape[1], at_once=_AT_ONCE, num_warps=4)
    return codes.view(torch.float8_e4m3fn), scales


@triton.jit
def _round_row(x, codes, scales, size, at_once: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, at_once)
    largest = tl.zeros([at_once], tl.float32)
    for start in range(0, size, at_once):
        own = tl.load(x + row * size + start + place, mask=start + place < size, other=0.0)
        largest = tl.maximum(largest, tl.abs(own.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0) / 448.0, 1e-30)
    tl.store(scales + row, scale)
    for start in range(0, size, at_once):
        real = start + place < size
        own = tl.load(x + row * size + start + place, mask=real, other=0.0)
        tl.store(codes + row * size + start + place, encoded(own.to(tl.float32), scale, 3), mask=real)
