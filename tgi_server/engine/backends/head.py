"""The LM head of steps in which each row needs only its largest logits: one if it is greedy, or `top_k`."""

from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.rounding import ROUNDED_AT_ONCE, rounded_to_bytes
from tgi_server.engine.checkpoint.stored_weights import copy_of_stored
from tgi_server.engine.linear.float import FloatLinear, packed_in_parts
from tgi_server.engine.linear.kernel_linear import padded
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.memory import malloc_trim
from tgi_server.engine.sampling.processors import TokenMask

_INPUT_ZERO_POINT = 128  # as in kernels/cpu/gemm/microkernel.h
# Smaller weights are read so fast that a pre-filter saves nothing.
_LARGE_BYTES = 8 << 20


class PrefilteredHead(FloatLinear):
    """y = x W^T, and an int8 copy of W that bounds all outputs: the pre-filter.

    Passes that need no more than a few of the largest outputs of each row read the copy first, and compute exactly only
    the outputs whose bounds allow them to be among these. They are the same to the last bit in both ways.

    tied: the embedding has W in memory, so that single outputs can be computed, and not only whole tiles of them.
    """

    tied = False

    @classmethod
    def pays(cls, weight: Tensor) -> bool:
        """Returns True if a weight, [outputs, inputs], is large enough and the kernels take it."""
        return weight.nbytes >= _LARGE_BYTES and weight.shape[1] % 16 == 0 and cls.supports(weight.dtype)

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        assert bias is None
        self._prefilter = _prefilter(weight)
        self._max_inputs = torch.ops.oatmill.prefilter_rows(self._prefilter[0]) * self.in_features
        malloc_trim()
        super()._pack(weight, bias, kernels)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._prefilter = copy_of_stored(self._prefilter[0]), *self._prefilter[1:]

    def top_logits(
        self, x: Tensor, count: int = 1, mask: TokenMask | None = None, weight: Tensor | None = None
    ) -> Tensor:
        """Returns the `count` largest outputs of each row and some others, [rows, outputs]; the rest is minus infinity.

        Outputs that are equal to the last of these count, too. x: [rows, inputs]. mask: they are the largest of what
        the row's mask allows. weight: W, where it is in memory.
        """
        if x.numel() > self._max_inputs:
            return self(x)
        bits, positions = (mask.bits, list(mask.positions)) if mask else (None, [])
        y: Tensor = self._layer.top_logits(x, count, *self._prefilter, weight, bits, positions)
        return y

    @property
    def prefilter(self) -> dict[str, Any]:
        """Returns the members of a `torch.classes.oatmill.Prefilter`, but for the weight."""
        names = ("packed", "scales", "compensation", "error_norm", "weight_norm")
        return dict(zip(names, self._prefilter, strict=True)) | {"rows": self._max_inputs // self.in_features}


def _prefilter(weight: Tensor) -> tuple[Tensor, ...]:
    """Returns the int8 copy, packed for the kernels, and what `_quantized` returns of each output, padded."""
    packed, (scales, sums, error_norms, norms) = packed_in_parts(weight, ROUNDED_AT_ONCE, _quantized)
    return packed, padded(scales), padded(sums * _INPUT_ZERO_POINT, torch.int32), padded(error_norms), padded(norms)


def _quantized(weight: Tensor) -> tuple[Tensor, ...]:
    """Returns rows of a weight in int8, their scales, their sums, and upper bounds of two Euclidean norms of each row.

    The norms are those of the quantization error and of the quantized row.
    """
    exact = weight.float()
    quantized, scales = rounded_to_bytes(exact)
    values = quantized.float()
    error = (exact / scales.unsqueeze(1)).sub_(values)
    margin = scales * (1 + 2**-12)
    sums = quantized.sum(1, dtype=torch.int32)  # int64 takes torch some 20 times as long
    return quantized, scales, sums, error.norm(dim=1) * margin, values.norm(dim=1) * margin
