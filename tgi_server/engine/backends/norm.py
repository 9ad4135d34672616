"""Normalisation in one kernel."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from tgi_server.engine.models.spec import NormKind


class Norm(nn.Module):
    """An RMS norm (Zhang and Sennrich 2019), or, if `centred`, a layer norm (Ba et al. 2016).

    weight: [size], of the dtype of what is normalised, or for the former in float32: then the product with it is
    rounded once, and not before it as well. A layer norm may have weights for each head, [heads, size]. bias: [size] or
    None, of a layer norm. eps: added under the root.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, *, centred: bool) -> None:
        super().__init__()
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._centred = centred

    @classmethod
    def of(cls, norm: Any, kind: NormKind) -> Self:
        """Takes the weights of a norm of `transformers` or torch."""
        eps = float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
        weight, bias = norm.weight, getattr(norm, "bias", None)
        if kind == "rms_once":
            weight = weight.float()
        elif kind == "rms_plus_one":
            weight = 1.0 + weight.float()
        return cls(weight, bias, eps, centred=kind == "layer")

    @property
    def size(self) -> int:
        """The number of elements that are normalised together."""
        return int(self._weight.shape[-1])

    def kernel(self) -> Any:
        """Returns this norm in the form that `torch.classes.oatmill.Decoder` takes."""
        return torch.classes.oatmill.Norm(self._weight, self._bias, self._eps, self._centred)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the normalised x, of the same shape [..., size]."""
        if not on_gpu(x):
            if self._centred:
                return torch.ops.oatmill.layer_norm(x, self._weight, self._bias, self._eps)
            return torch.ops.oatmill.rms_norm(x, self._weight, self._eps)
        from tgi_server.engine.kernels.triton import norm_and_gate

        if not self._centred:
            return norm_and_gate.rms_norm(x, self._weight, self._eps)
        if self._bias is not None:
            return norm_and_gate.layer_norm(x, self._weight, self._bias, self._eps)
        return (layer_norm(x.float(), x.shape[-1:], None, None, self._eps) * self._weight.float()).to(x.dtype)


def on_gpu(x: Tensor) -> bool:
    """Returns True if x is for the kernels in Triton, False for those of the CPU."""
    return x.device.type == "cuda"
