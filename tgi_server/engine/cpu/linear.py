"""Linear layers whose weights oneDNN has arranged once for its own kernels, rather than anew at every call."""

from typing import Self

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """y = x W^T + b, with W in oneDNN's own layout.

    weight: [out_features, in_features] float32 or bfloat16, not needed any more afterwards. bias: [out_features].
    rounding: how much this kind of layer may change a model's logits, relative to their norm.
    """

    rounding = 0.0

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.new_empty(0)  # some models ask for its dtype
        self._pack(weight, bias)

    def _pack(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
        self._bias = bias

    @classmethod
    def joined(cls, *linears: nn.Linear) -> Self:
        """Linears that are given the same input, as one whose outputs stand side by side."""
        weight = torch.cat(tuple(linear.weight for linear in linears))
        if all(linear.bias is None for linear in linears):
            return cls(weight)
        biases = [weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
        return cls(weight, torch.cat(tuple(biases)))

    def unpacked(self) -> nn.Linear:
        """What this took the place of."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self._bias is not None, device="meta")
        linear.weight = nn.Parameter(self._packed.to_dense(), requires_grad=False)
        if self._bias is not None:
            linear.bias = nn.Parameter(self._bias, requires_grad=False)
        return linear

    def forward(self, x: Tensor, activation: str = "none") -> Tensor:
        """x: [..., in_features]. activation: "none" or "relu", applied in the same kernel."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, activation, [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + forward(x), the sum in the same kernel. residual: [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")


_TYPICAL_ROWS = 32
"""oneDNN chooses a layout with a number of rows in mind; it is right for any number."""
