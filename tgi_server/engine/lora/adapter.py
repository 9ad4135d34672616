"""A layer of an adapter as the engine computes it: two small matrices, and perhaps a DoRA scale and a bias delta."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tgi_server.engine.lora.base_model import BaseLayer


@dataclass(frozen=True, slots=True)
class AdapterLayer:
    """The delta of one linear layer: y = dora_scale * base(x) + b (a x) + bias_delta; base(x) includes the bias.

    All formats of adapters are converted to this (Hu et al., "LoRA", 2021; Liu et al., "DoRA", 2024). b includes the
    scale alpha / rank or alpha / sqrt(rank), and the DoRA scale: magnitude over row norms of the changed weight.

    a: [rank, in_features]. b: [out_features, rank]. dora_scale, bias_delta: [out_features], or None for 1 and 0.
    """

    a: Tensor
    b: Tensor
    dora_scale: Tensor | None = None
    bias_delta: Tensor | None = None

    def merged(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Returns the weight, [out_features, in_features], and the bias of the changed layer, in float32.

        weight, bias: those of the base layer.
        """
        changed = weight.to(torch.float32, copy=True)
        if self.dora_scale is not None:
            changed *= self.dora_scale.float().unsqueeze(1)
        changed.addmm_(self.b.float(), self.a.float())
        return changed, bias if bias is None else self.merged_bias(bias)

    def merged_bias(self, bias: Tensor) -> Tensor:
        """Returns the bias of the changed layer, [out_features] float32. bias: that of the base layer."""
        scaled = bias.float() if self.dora_scale is None else bias.float() * self.dora_scale.float()
        return scaled if self.bias_delta is None else scaled + self.bias_delta.float()

    @property
    def changes_nothing(self) -> bool:
        """True for a layer that training has not changed: peft initializes b with zeros."""
        return self.dora_scale is None and self.bias_delta is None and not self.b.any()

    def split(self, layers: Mapping[str, BaseLayer]) -> dict[str, Self]:
        """Splits the outputs among several layers, given by path. Returns a layer for each path."""
        sizes = [layer.out_features for layer in layers.values()]
        rows = [
            (None,) * len(sizes) if tensor is None else tensor.split(sizes)
            for tensor in (self.b, self.dora_scale, self.bias_delta)
        ]
        return {path: type(self)(self.a, *parts) for path, *parts in zip(layers, *rows, strict=True)}
