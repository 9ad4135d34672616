"""The interface that every kind of linear layer has."""

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor, nn

from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.checkpoint.quantized.layer import plain_linear
from tgi_server.engine.linear.kernel_table import KernelTable


class PackedLinear(nn.Module):
    """y = x W^T + b, with W arranged once for the kernels that read it.

    weight: [out_features, in_features]; the layer keeps no reference to it. bias: [out_features].
    kernels: which kernel computes how many rows, where the layer has several.
    rounding: how much this kind of layer may change a model's logits, relative to their norm. few_rows: maximum number
    of rows for `fused`, a method that also normalises x and applies an activation or a gate to y; 0: no such method.
    rounds_inputs: the layer has methods `of_norm` and `of_activated`, in which the kernel that rounds x also normalises
    it, or computes it. lora: the LoRA deltas of rows that have an adapter, an AdaptedLinear; None: there are none.
    """

    rounding = 0.0
    few_rows = 0
    rounds_inputs = False
    lora: Any = None
    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None = None, kernels: KernelTable | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # empty: some models of `transformers` ask for its dtype
        self.register_buffer("weight", weight.new_empty(0), persistent=False)
        self._pack(weight, bias, kernels)

    @classmethod
    def joined(cls, *linears: nn.Linear, kernels: KernelTable | None = None) -> Self:
        """Returns one layer for linears with the same input; its outputs are theirs, concatenated."""
        weight = torch.cat(tuple(linear.weight for linear in linears))
        if all(linear.bias is None for linear in linears):
            return cls(weight, None, kernels)
        biases = [weight.new_zeros(len(linear.weight)) if linear.bias is None else linear.bias for linear in linears]
        return cls(weight, torch.cat(tuple(biases)), kernels)

    def adapted(self, x: Tensor, rows: Any, *, residual: Tensor | None = None) -> Tensor:
        """Returns y with the LoRA deltas of some rows, and the residual added last.

        rows: AdapterRows of the pass; None: no row has an adapter. residual: it may be overwritten.
        """
        if rows is not None and self.lora is not None and self.lora.changes(rows):
            changed: Tensor = self.lora.apply(x, self(x), rows, residual=residual)
            return changed
        return self(x) if residual is None else self.add_to(residual, x)

    def unpacked(self) -> nn.Linear:
        """Returns the plain linear layer that this one replaced."""
        weight, bias = self._dense()
        return plain_linear(weight, None if bias is None else bias.to(weight.dtype))

    def kernel(self) -> Any:
        """Returns this layer in the form that `torch.classes.oatmill.Decoder` takes, or None if it cannot take it."""
        return None

    @abstractmethod
    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        """Packs the weight."""

    @abstractmethod
    def _dense(self) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias, with the rounding of the packed form."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Returns y, [..., out_features], for x, [..., in_features]."""

    @abstractmethod
    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual + forward(x), computed in one kernel. residual: [..., out_features]."""


class PackedQuantized(PackedLinear):
    """y = x W^T + b with W quantized. y has the dtype of x.

    dtype: reported as the dtype of the weights.
    """

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None = None,
        kernels: KernelTable | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", torch.empty(0, dtype=dtype, device=weight.codes.device), persistent=False)
        self._pack(weight, bias, kernels)

    @abstractmethod
    def _pack(self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable | None) -> None:  # type: ignore[override]
        """Packs the weight."""
