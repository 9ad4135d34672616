"""Linear layers with float32, bfloat16 or float16 weights, by the engine's own kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.kernel_table import KernelTable

# Outputs that the engine's own kernels compute together (`kernels/linear.h`).
TILE = 48


class FloatLinear(PackedLinear):
    """y = x W^T + b with sums in float32. x may be of another float dtype than W; y has the dtype of x."""

    _dtypes = (torch.float32, torch.bfloat16, torch.float16)

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """Returns True if the kernels are available and take weights of this dtype."""
        return dtype in cls._dtypes and load_kernels()

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        self._set(torch.ops.oatmill.linear_pack(weight), bias, kernels)

    def _set(
        self,
        packed: Tensor,
        bias: Tensor | None,
        kernels: KernelTable | None,
        scales: Tensor | None = None,
        corrections: Tensor | None = None,
    ) -> None:
        table = kernels or KernelTable.of(torch.ops.oatmill.linear_kernels(packed)[0])
        self._packed = packed
        self._bias = None if bias is None else padded(bias)
        self._layer = torch.classes.oatmill.Linear(
            packed,
            self.in_features,
            self.out_features,
            self._bias,
            scales,
            corrections,
            list(table.kernels),
            list(table.from_rows),
            None,
        )

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        weight = torch.ops.oatmill.linear_unpack(self._packed, self.out_features, self.in_features)
        return weight, None if self._bias is None else self._bias[: self.out_features]

    def kernel(self) -> Any:
        return self._layer

    def forward(self, x: Tensor, activation: str = "none") -> Tensor:
        y: Tensor = self._layer.forward(x, activation == "relu", None)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self._layer.forward(x, False, residual)
        return y


def padded(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns values, [outputs], in a dtype and with zeros up to a whole tile, which the engine's own kernels need."""
    return pad(values.to(dtype), (0, -len(values) % TILE))
