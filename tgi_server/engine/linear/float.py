"""Linear layers with float32, bfloat16 or float16 weights, by the engine's own kernels."""

import torch
from torch import Tensor

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.kernel_linear import KernelLinear
from tgi_server.engine.linear.kernel_table import KernelTable


class FloatLinear(KernelLinear):
    """y = x W^T + b with sums in float32. x may be of another float dtype than W; y has the dtype of x."""

    _dtypes = (torch.float32, torch.bfloat16, torch.float16)

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """Returns True if the kernels are available and take weights of this dtype."""
        return dtype in cls._dtypes and load_kernels()

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        packed = torch.ops.oatmill.linear_pack(weight)
        self._set(packed, bias, kernels, torch.ops.oatmill.linear_kernels(packed))

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        weight = torch.ops.oatmill.linear_unpack(self._packed, self.out_features, self.in_features)
        return weight, self._plain_bias()
