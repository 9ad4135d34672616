"""The LM head of steps in which all rows are greedy."""

import torch
from torch import Tensor

from tgi_server.engine.attention.base import ForwardMetadata
from tgi_server.engine.linear.float import Bf16Linear, padded
from tgi_server.engine.linear.int8 import INPUT_OFFSET, rounded_to_bytes

# Smaller weights are read so fast that screening saves nothing.
_LARGE_BYTES = 8 << 20
_ROWS_AT_ONCE = 1024  # of the weight, while it is rounded


class ScreenedHead(Bf16Linear):
    """y = x W^T, and a copy of W in 8 bits that tells which outputs can be the largest without computing all.

    The copy is read in passes whose metadata say that no more is needed than the largest output of each row. That is
    the same to the last bit, and so is its place, whichever way it is found.
    """

    @classmethod
    def pays(cls, weight: Tensor) -> bool:
        """Returns True if a weight, [outputs, inputs], is large enough and this CPU has the instructions."""
        if weight.nbytes < _LARGE_BYTES or weight.shape[1] % 16:
            return False
        return cls.supports(weight.dtype) and torch.ops.oatmill.screened_rows() > 0

    def _pack(self, weight: Tensor, bias: Tensor | None) -> None:
        assert bias is None
        self._most = torch.ops.oatmill.screened_rows() * self.in_features
        super()._pack(weight, bias)
        parts = [_rounded(part) for part in weight.split(_ROWS_AT_ONCE)]
        rounded, scales, sums, lost, kept = (torch.cat(part) for part in zip(*parts, strict=True))
        self._screen = (
            torch.ops.oatmill.int8_pack(rounded),
            padded(scales),
            padded(sums * INPUT_OFFSET, torch.int32),
            padded(lost),
            padded(kept),
        )

    def forward(self, x: Tensor, activation: str = "none", metadata: ForwardMetadata | None = None) -> Tensor:
        greedy = metadata.greedy if metadata else None
        if greedy is None or x.numel() > self._most:
            return super().forward(x, activation)
        arguments = x, self._packed, self.out_features, *self._screen
        if greedy.mask is None:
            return torch.ops.oatmill.screened_linear(*arguments)
        mask = greedy.mask.wait()
        return torch.ops.oatmill.screened_linear(*arguments, mask.bits, mask.positions)


def _rounded(weight: Tensor) -> tuple[Tensor, ...]:
    """Returns rows of a weight as bytes, their scales, their sums, and upper bounds of two lengths for each row.

    The lengths are the Euclidean norms of the part that rounding lost, and of the part that it kept.
    """
    rounded, scales, sums = rounded_to_bytes(weight)
    kept = rounded.float()
    lost = weight.float().div_(scales.unsqueeze(1)).sub_(kept)
    margin = scales * (1 + 2**-12)
    return rounded, scales, sums, lost.norm(dim=1) * margin, kept.norm(dim=1) * margin
