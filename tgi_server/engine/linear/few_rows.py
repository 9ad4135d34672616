"""Dense linear layers on a GPU whose products with few rows are the engine's own, and other products cuBLAS's."""

from typing import Any

from torch import Tensor

from tgi_server.engine.kernels.triton.few_rows import MOST_ROWS, InputNorm, arrivals, multiply_few
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.blas import BlasLinear
from tgi_server.engine.linear.kernel_table import KernelTable


class FewRowsLinear(BlasLinear):
    """y = x W^T + b, with W as it is in the checkpoint, in bfloat16."""

    few_rows = MOST_ROWS

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        super()._pack(weight.contiguous(), bias, kernels)
        self._wide_bias = None if bias is None else bias.float()
        self._arrived = arrivals(len(weight), weight.device)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, self.in_features) if x.is_contiguous() else x.reshape(-1, self.in_features)
        if not 0 < len(rows) <= self.few_rows:
            return super().forward(x)
        return self.fused(rows).view(*x.shape[:-1], self.out_features)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if x.dim() != 2 or not 0 < len(x) <= self.few_rows:
            return super().add_to(residual, x)
        return self.fused(x, residual=residual.contiguous())

    def fused(self, x: Tensor, residual: Tensor | None = None, **around: Any) -> Tensor:
        return multiply_few(x, self._weight, None, self._wide_bias, residual, self._arrived, **around)


def norm_of_inputs(layer: PackedLinear, weight: Tensor, bias: Tensor | None, eps: float, *, centred: bool) -> InputNorm:
    """Returns the norm of the inputs of a layer, for its `fused`.

    weight, bias: [inputs], of the norm. centred: it is a layer norm.
    """
    dense = layer.unpacked()
    own = None if dense.bias is None else dense.bias.float()
    if not centred:
        return InputNorm(weight, eps, own)
    wide = dense.weight.detach().float()
    if bias is not None:
        own = wide @ bias.float() if own is None else own + wide @ bias.float()
    return InputNorm(weight, eps, own, wide @ weight.float())
