"""Feed-forward parts of a model of `transformers` in one call of the CPU's kernels: down(silu(gate(x)) * up(x))."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.linear import PackedLinear

# Names of the gate, of what it multiplies, and of the projection behind them.
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# Rows on which a module and the kernel are compared, and by how much of their norm they may differ: the products are
# the same.
_ROWS = 3
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 2e-3}

_Forward = Callable[..., Tensor]


def install_gated_mlp_kernels(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes feed-forward parts whose linear layers are packed call the kernel where that computes the same."""
    for module in model.modules():
        names = next((each for each in _NAMES if all(name in module._modules for name in each)), None)
        if names is not None and dtype in _TOLERANCE:
            linears = [getattr(module, name) for name in names]
            kernel = _kernel_of(module, linears, dtype)
            if kernel is not None:
                module.forward = partial(_computed, kernel, linears, module.forward)


def _are_plain(linears: Sequence[Any]) -> bool:
    """Returns True if linear layers have kernels, and nothing changes what these compute, as adapters' hooks do."""
    return not any(
        each._forward_hooks or not isinstance(each, PackedLinear) or each.kernel() is None for each in linears
    )


@torch.inference_mode()
def _kernel_of(module: nn.Module, linears: list[Any], dtype: torch.dtype) -> Any:
    """Returns a `torch.classes.oatmill.GatedMlp` if that computes what a module does, else None."""
    if not _are_plain(linears) or "MLP" not in type(module).__name__:
        return None
    kernel = torch.classes.oatmill.GatedMlp(*(each.kernel() for each in linears))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _ROWS, linears[0].in_features, generator=generator).to(dtype)
    try:
        expected = module(x)
    except TypeError:  # of other arguments
        return None
    error = (kernel.forward(x).float() - expected.float()).norm()
    return kernel if error <= _TOLERANCE[dtype] * expected.float().norm() else None


def _computed(kernel: Any, linears: list[Any], otherwise: _Forward, x: Tensor, *others: Any, **named: Any) -> Tensor:
    if not _are_plain(linears):
        return otherwise(x, *others, **named)
    computed: Tensor = kernel.forward(x)
    return computed
