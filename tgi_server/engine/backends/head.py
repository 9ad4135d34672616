"""The LM head of steps in which all rows are greedy."""

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.rounding import ROUNDED_AT_ONCE, rounded_to_bytes
from tgi_server.engine.linear.float import FloatLinear, packed_in_parts
from tgi_server.engine.linear.int8 import INPUT_ZERO_POINT
from tgi_server.engine.linear.kernel_linear import padded
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.memory import malloc_trim
from tgi_server.engine.sampling.processors import TokenMask

# Smaller weights are read so fast that screening saves nothing.
_LARGE_BYTES = 8 << 20


class ScreenedHead(FloatLinear):
    """y = x W^T, and a copy of W in 8 bits that tells which outputs can be the largest without computing all.

    The copy is read in passes of which no more is needed than the largest output of each row. That is the same to the
    last bit, and so is its place, whichever way it is found.
    """

    @classmethod
    def pays(cls, weight: Tensor) -> bool:
        """Returns True if a weight, [outputs, inputs], is large enough and the kernels take it."""
        return weight.nbytes >= _LARGE_BYTES and weight.shape[1] % 16 == 0 and cls.supports(weight.dtype)

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        assert bias is None
        self._screen = _screen(weight)
        self._most = torch.ops.oatmill.prefilter_rows(self._screen[0]) * self.in_features
        malloc_trim()
        super()._pack(weight, bias, kernels)

    def largest(self, x: Tensor, mask: TokenMask | None = None) -> Tensor:
        """Returns the outputs of which one is the largest of its row, [rows, outputs]; the others are minus infinity.

        x: [rows, inputs]. mask: the largest output is one of those that the row's mask allows.
        """
        if x.numel() > self._most:
            return self(x)
        bits, positions = (mask.bits, list(mask.positions)) if mask else (None, [])
        y: Tensor = self._layer.screened(x, *self._screen, bits, positions)
        return y

    @property
    def screen(self) -> tuple[list[Tensor], int]:
        """Returns the copy as kernels take it, and the rows up to which it is read."""
        return list(self._screen), self._most // self.in_features


def _screen(weight: Tensor) -> tuple[Tensor, ...]:
    """Returns the copy in 8 bits, arranged for the kernels, and what `_rounded` returns of each output, padded."""
    packed, (scales, sums, lost, kept) = packed_in_parts(weight, ROUNDED_AT_ONCE, _rounded)
    return packed, padded(scales), padded(sums * INPUT_ZERO_POINT, torch.int32), padded(lost), padded(kept)


def _rounded(weight: Tensor) -> tuple[Tensor, ...]:
    """Returns rows of a weight as bytes, their scales, their sums, and upper bounds of two lengths for each row.

    The lengths are the Euclidean norms of the part that rounding lost, and of the part that it kept.
    """
    exact = weight.float()
    rounded, scales = rounded_to_bytes(exact)
    kept = rounded.float()
    lost = (exact / scales.unsqueeze(1)).sub_(kept)
    margin = scales * (1 + 2**-12)
    return rounded, scales, rounded.sum(1), lost.norm(dim=1) * margin, kept.norm(dim=1) * margin
