"""Linear layers with float32 or bfloat16 weights, which are arranged once for the kernels that read them."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tgi_server.engine.kernels import load_kernels

# Outputs that the engine's own kernels compute together (`kernels/linear.h`).
TILE = 48
# oneDNN chooses a layout with a number of rows in mind; the layout is right for any number.
_TYPICAL_ROWS = 32


class PackedLinear(nn.Module):
    """y = x W^T + b, with W in oneDNN's own layout.

    weight: [out_features, in_features] float32 or bfloat16; the layer keeps no reference to it. bias: [out_features].
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
        """Returns one layer for linears with the same input; it gives their outputs side by side."""
        weight = torch.cat(tuple(linear.weight for linear in linears))
        if all(linear.bias is None for linear in linears):
            return cls(weight)
        biases = [weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
        return cls(weight, torch.cat(tuple(biases)))

    def unpacked(self) -> nn.Linear:
        """Returns the plain linear layer that this one replaced."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self._bias is not None, device="meta")
        linear.weight = nn.Parameter(self._dense(), requires_grad=False)
        if self._bias is not None:
            bias = self._bias[: self.out_features].to(linear.weight.dtype)
            linear.bias = nn.Parameter(bias, requires_grad=False)
        return linear

    def _dense(self) -> Tensor:
        return self._packed.to_dense()

    def kernel(self) -> Any:
        """Returns this layer in the form that `torch.classes.oatmill.Decoder` takes, or None if it cannot take it."""
        return None

    def forward(self, x: Tensor, activation: str = "none") -> Tensor:
        """Returns y, [..., out_features], for x, [..., in_features]. activation: "none" or "relu"."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, activation, [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual + forward(x), computed in one kernel. residual: [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")


class Bf16Linear(PackedLinear):
    """y = x W^T + b with bfloat16 weights, by the engine's own kernel; sums are in float32."""

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Returns True if weights of this dtype are bfloat16 and this CPU has the instructions."""
        return dtype == torch.bfloat16 and load_kernels() and bool(torch.ops.oatmill.bf16_supported())

    def _pack(self, weight: Tensor, bias: Tensor | None) -> None:
        self._odd = self.in_features % 2  # inputs are multiplied two at a time
        self._packed = torch.ops.oatmill.bf16_pack(weight)
        self._bias = None if bias is None else padded(bias)

    def _dense(self) -> Tensor:
        tiles = self._packed.transpose(1, 2).flatten(2).flatten(0, 1)
        return tiles[: self.out_features, : self.in_features].contiguous()

    def kernel(self) -> Any:
        if self._odd:
            return None
        return torch.classes.oatmill.Linear(self._packed, self.out_features, self._bias, None, None)

    def forward(self, x: Tensor, activation: str = "none") -> Tensor:
        return self._product(x, activation == "relu", None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._product(x, False, residual)

    def _product(self, x: Tensor, relu: bool, residual: Tensor | None) -> Tensor:
        if self._odd:
            x = pad(x, (0, 1))
        return torch.ops.oatmill.bf16_linear(x, self._packed, self.out_features, self._bias, relu, residual)


def padded(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns values, [outputs], in a dtype and with zeros up to a whole tile, which the engine's own kernels need."""
    return pad(values.to(dtype), (0, -len(values) % TILE))
