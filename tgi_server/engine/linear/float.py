"""Linear layers with float32, bfloat16 or float16 weights, by the engine's own kernels."""

from collections.abc import Callable

import torch
from torch import Tensor

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.kernel_linear import TILE, KernelLinear
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.memory import read_once

# Numbers of a weight that are arranged at a time.
_NUMBERS_AT_ONCE = 1 << 22


class FloatLinear(KernelLinear):
    """y = x W^T + b with sums in float32. x may be of another float dtype than W; y has the dtype of x."""

    _dtypes = (torch.float32, torch.bfloat16, torch.float16)

    @classmethod
    def supports(cls, dtype: torch.dtype) -> bool:
        """Returns True if the kernels are available and take weights of this dtype."""
        return dtype in cls._dtypes and load_kernels()

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        packed, _ = packed_in_parts(weight, _NUMBERS_AT_ONCE, lambda part: (part,))
        self._set(packed, bias, kernels, torch.ops.oatmill.linear_kernels(packed))

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        weight = torch.ops.oatmill.linear_unpack(self._packed, self.out_features, self.in_features)
        return weight, self._plain_bias()


def packed_in_parts(
    weight: Tensor, numbers: int, convert: Callable[[Tensor], tuple[Tensor, ...]]
) -> tuple[Tensor, list[Tensor]]:
    """Arranges a weight for the kernels in pieces of about `numbers` numbers, so that little is in memory twice.

    convert: returns, for the weights of some outputs, [outputs, inputs], the tensor to arrange and further tensors with
    a row for each output. Returns the arranged weight, and the further tensors of all outputs.
    """
    rows = max(1, numbers // (weight.shape[1] * TILE)) * TILE
    packed: Tensor | None = None
    facts: list[list[Tensor]] = []
    for index, part in enumerate(read_once(weight, rows)):
        arranged, *others = convert(part)
        if packed is None:
            packed = torch.ops.oatmill.linear_room(arranged, len(weight))
        torch.ops.oatmill.linear_pack_into(arranged, packed[index * rows // TILE :])
        facts.append(others)
    assert packed is not None  # a weight has outputs
    return packed, [torch.cat(facts_of_chunk) for facts_of_chunk in zip(*facts, strict=True)]
