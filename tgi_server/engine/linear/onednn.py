"""Linear layers by oneDNN, the library that torch computes with on CPUs."""

from functools import cache

import torch
from torch import Tensor

from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.kernel_table import KernelTable

# oneDNN chooses a layout with a number of rows in mind; the layout is right for any number.
_TYPICAL_ROWS = 32


class OneDnnLinear(PackedLinear):
    """y = x W^T + b with W in oneDNN's own layout, in float32 where this CPU has no products of W's dtype."""

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        dtype = weight.dtype if has_products(weight.dtype) else torch.float32
        self._dtype = dtype
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), _TYPICAL_ROWS)
        self._bias = None if bias is None else bias.to(dtype)

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        return self._packed.to_dense().to(self.weight.dtype), self._bias

    def forward(self, x: Tensor) -> Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x.to(self._dtype), self._packed, self._bias, "none", [], "")
        return y.to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        wide, added = x.to(self._dtype), residual.to(self._dtype)
        return torch.ops.mkldnn._linear_pointwise.binary(wide, added, self._packed, self._bias, "add").to(x.dtype)


@cache
def has_products(dtype: torch.dtype) -> bool:
    """Returns True if oneDNN multiplies by weights of this dtype on this CPU."""
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), _TYPICAL_ROWS)
        torch.ops.mkldnn._linear_pointwise(torch.zeros(1, 16, dtype=dtype), packed, None, "none", [], "")
    except RuntimeError:
        return False
    return True
