"""Normalisation in one kernel."""

from typing import Any, Self

import torch
from torch import Tensor, nn


class Norm(nn.Module):
    """Layer normalisation (Ba et al. 2016), or, without a bias, by the root mean square (Zhang and Sennrich 2019).

    weight, bias: [size]. eps: added under the root.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        super().__init__()
        self._weight = weight
        self._bias = bias
        self._eps = eps

    @classmethod
    def of_layer_norm(cls, norm: nn.LayerNorm) -> Self:
        return cls(norm.weight, norm.bias, norm.eps)

    @classmethod
    def of_rms_norm(cls, norm: Any) -> Self:
        """norm: the module that Llama and its like have in `transformers`."""
        return cls(norm.weight, None, float(norm.variance_epsilon))

    def kernel(self) -> Any:
        """This norm for `torch.classes.oatmill.Decoder`."""
        return torch.classes.oatmill.Norm(self._weight, self._bias, self._eps)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size]."""
        if self._bias is None:
            return torch.ops.oatmill.rms_norm(x, self._weight, self._eps)
        return torch.ops.oatmill.layer_norm(x, self._weight, self._bias, self._eps)
