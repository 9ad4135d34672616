"""Norms by the root mean square of a model of `transformers`, each in one call of the CPU's kernels.

In plain torch a norm is some ten short operators, which take longer than a decoding step's products of small layers.
Which formula a module has is tried out: models differ in where they round, add one to their weights, or apply a gate.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.backends.decoder import Norm, Unfit

# Rows on which a module and a kernel are compared, and by how much of their norm they may differ.
_ROWS = 3
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}
# Of gated norms: the gate comes first, and it is the sigmoid.
_GATES = ((False, False), (True, False), (False, True))

_Forward = Callable[..., Tensor]


def install_norm_kernels(model: nn.Module) -> None:
    """Makes the norms of a model call the kernels that compute the same."""
    for module in model.modules():
        weights = dict(module.named_parameters(recurse=False))
        if "RMSNorm" in type(module).__name__ and weights.keys() == {"weight"} and weights["weight"].dim() == 1:
            kernel = _kernel_of(module, weights["weight"].detach())
            if kernel is not None:
                module.forward = kernel


@torch.inference_mode()
def _kernel_of(module: nn.Module, weight: Tensor) -> _Forward | None:
    """Returns the kernel that computes what a module does; None if there is none."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or weight.dtype not in _TOLERANCE:
        return None
    try:
        if "Gated" not in type(module).__name__:
            norm = Norm.of(module)
            return None if norm.centred else partial(_normalised, norm.weight, eps)
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(2, 1, _ROWS, weight.numel(), generator=generator).to(weight.dtype).unbind()
        expected = module(*inputs)
    except (TypeError, Unfit):  # of other arguments, or of a formula of its own
        return None
    own = list(_gated(module, weight, eps))
    errors = [_error(each(*inputs), expected) for each in own]
    least = min(errors)
    return own[errors.index(least)] if least <= _TOLERANCE[weight.dtype] else None


def _normalised(weight: Tensor, eps: float, hidden_states: Tensor) -> Tensor:
    normed: Tensor = torch.ops.oatmill.rms_norm(hidden_states, weight, eps)
    return normed


def _gated(module: Any, weight: Tensor, eps: float) -> Iterator[_Forward]:
    size = weight.numel()
    group = getattr(module, "group_size", None) or size // getattr(module, "n_groups", 1)
    for first, sigmoid in _GATES:
        yield partial(_normalised_gated, weight.float(), eps, group, first, sigmoid)


def _normalised_gated(
    weight: Tensor, eps: float, group: int, first: bool, sigmoid: bool, hidden_states: Tensor, gate: Tensor
) -> Tensor:
    size = weight.numel()
    x, gates = hidden_states.reshape(-1, size), gate.reshape(-1, size)
    return torch.ops.oatmill.gated_norm(x, gates, weight, eps, group, first, sigmoid).view(hidden_states.shape)


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return math.inf
    return float((actual.float() - expected.float()).norm() / expected.float().norm())
