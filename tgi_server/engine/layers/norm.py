"""Normalisation in one kernel."""

from typing import Any, Self

import torch
from torch import Tensor, nn


class Norm(nn.Module):
    """Layer normalisation (Ba et al. 2016), or, without a bias, by the root mean square (Zhang and Sennrich 2019).

    weight, bias: [size]; of the dtype of what is normalised, but a weight without a bias may be in float32: then the
    product with it is rounded once, and not before it as well. eps: added under the root.
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
        """Takes the weights of a norm such as LlamaRMSNorm of `transformers`."""
        return cls(norm.weight, None, float(norm.variance_epsilon))

    @classmethod
    def of_gemma_norm(cls, norm: Any) -> Self:
        """Takes the weights of a norm such as GemmaRMSNorm of `transformers`: how far from 1 they are."""
        return cls(1.0 + norm.weight.float(), None, float(norm.eps))

    def kernel(self) -> Any:
        """Returns this norm in the form that `torch.classes.oatmill.Decoder` takes."""
        return torch.classes.oatmill.Norm(self._weight, self._bias, self._eps, self._bias is not None)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised x, of the same shape [..., size]."""
        if on_gpu(x):
            from tgi_server.engine.kernels.triton import norm_and_gate

            if self._bias is None:
                return norm_and_gate.rms_norm(x, self._weight, self._eps)
            return norm_and_gate.layer_norm(x, self._weight, self._bias, self._eps)
        if self._bias is None:
            return torch.ops.oatmill.rms_norm(x, self._weight, self._eps)
        return torch.ops.oatmill.layer_norm(x, self._weight, self._bias, self._eps)


def on_gpu(x: Tensor) -> bool:
    """Returns True if x is for the kernels in Triton, False for those of the CPU."""
    return x.device.type == "cuda"
