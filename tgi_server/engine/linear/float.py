"""Linear layers with float32, bfloat16 or float16 weights, by the engine's own kernels."""

import torch
from torch import Tensor

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.kernel_linear import TILE, KernelLinear
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.memory import forget_pages

# Bytes of a weight that are arranged at a time.
_BYTES_AT_ONCE = 16 << 20


class FloatLinear(KernelLinear):
    """y = x W^T + b with sums in float32. x may be of another float dtype than W; y has the dtype of x."""

    _dtypes = (torch.float32, torch.bfloat16, torch.float16)

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """Returns True if the kernels are available and take weights of this dtype."""
        return dtype in cls._dtypes and load_kernels()

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        packed = _packed(weight)
        self._set(packed, bias, kernels, torch.ops.oatmill.linear_kernels(packed))

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        weight = torch.ops.oatmill.linear_unpack(self._packed, self.out_features, self.in_features)
        return weight, self._plain_bias()


def _packed(weight: Tensor) -> Tensor:
    """Arranges a weight for the kernels. Of a large one that lies in a file there is never all in memory twice."""
    tiles = _BYTES_AT_ONCE // (weight[:1].nbytes * TILE)
    if len(weight) <= max(1, tiles) * TILE:
        return torch.ops.oatmill.linear_pack(weight)
    first = 0
    for part in weight.split(max(1, tiles) * TILE):
        arranged = torch.ops.oatmill.linear_pack(part)
        if first == 0:
            packed = torch.ops.oatmill.linear_space(arranged, -(-len(weight) // TILE))
        packed[first : first + len(arranged)] = arranged
        first += len(arranged)
        forget_pages([part])
    return packed
