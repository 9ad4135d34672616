"""Linear layers by torch's own products, which on a GPU are those of cuBLAS."""

from torch import Tensor
from torch.nn.functional import linear

from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.kernel_table import KernelTable


class BlasLinear(PackedLinear):
    """y = x W^T + b, with W as it is in the checkpoint."""

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        self._weight = weight
        self._bias = bias

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        return self._weight, self._bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Adds to `residual` in place, in the product itself; callers must not need the old values."""
        residual.addmm_(x, self._weight.t())
        return residual if self._bias is None else residual.add_(self._bias)
