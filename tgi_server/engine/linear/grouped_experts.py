"""The dense experts of a mixture on a GPU for which torch has no grouped product: there the host would wait for it."""

import logging
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.checkpoint.quantized import Experts
from tgi_server.engine.kernels.triton import device_fault
from tgi_server.engine.parallel import ShardGroup, fault_of_any

logger = logging.getLogger(__name__)

# Compute capabilities of GPUs on which torch's `grouped_mm`, that of `transformers`, is one kernel, in bfloat16.
_GROUPED_MM = ((9, 0), (10, 0))
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
_BIASES = ("gate_up_proj_bias", "down_proj_bias")
# Tokens of the proof, one number for each shape of a program, as shares of the experts.
_TOKENS = (0.5, 9, 33)


def group_experts(model: nn.Module, dtype: torch.dtype, group: ShardGroup | None = None) -> list[str]:
    """Has the experts of a mixture on a GPU multiplied by the engine's own kernel, where torch's would wait.

    Returns the fall-backs: why they are multiplied in a slower way. All shards choose the same.
    """
    modules: list[Any] = [module for module in model.modules() if Experts.fits(module)]
    if not modules or not _waits(modules[0].down_proj):
        return []
    fault = fault_of_any(_fault_of(modules[0], dtype), group)
    if fault is not None:
        fallback = f"experts are multiplied one after the other, which is slow: {fault}"
        logger.warning(fallback)
        return [fallback]
    for path in [path for path, module in model.named_modules() if Experts.fits(module)]:
        model.set_submodule(path, GroupedExperts(model.get_submodule(path)))
    return []


class GroupedExperts(nn.Module):
    """Takes the place of a layer's experts, with the same weights."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        for name in _BIASES:  # [experts, outputs], where there are any
            self.register_parameter(name, getattr(experts, name, None))
        self.is_transposed = experts.is_transposed
        self._apply_gate = experts._apply_gate

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Returns the sum of each token's experts' outputs, [tokens, hidden_size], for inputs of the same shape.

        chosen: the experts of each token, [tokens, experts of a token] int64. shares: the same shape, what each counts.
        """
        from tgi_server.engine.kernels.triton.grouped_gemm import RowGroups, multiply_groups

        gate_up, down = self.gate_up_proj, self.down_proj
        if self.is_transposed:
            gate_up, down = gate_up.mT, down.mT
        of_token = chosen.shape[1]
        groups = RowGroups.of(chosen, len(down), hidden.element_size())
        biases = [getattr(self, name) for name in _BIASES]
        widened = multiply_groups(hidden, gate_up, biases[0], groups, of_token)
        outputs = multiply_groups(self._apply_gate(widened), down, biases[1], groups, shares=shares.flatten().float())
        return outputs.view(len(hidden), of_token, -1).sum(1)


def _waits(weight: Tensor) -> bool:
    """Returns True if torch has no kernel for the product."""
    if weight.dtype is not torch.bfloat16:
        return True
    return torch.cuda.get_device_capability(weight.device) not in _GROUPED_MM


def _fault_of(experts: Any, dtype: torch.dtype) -> str | None:
    """Multiplies some rows. Returns why the kernel must not be used, in words; None if it is right."""
    weight = experts.down_proj
    if fault := device_fault(weight.device):
        return fault
    count, hidden = len(weight), weight.shape[2 if experts.is_transposed else 1]
    generator = torch.Generator(weight.device).manual_seed(0)
    try:
        for share in _TOKENS:
            tokens = max(1, int(share * count))
            x = torch.randn(tokens, hidden, generator=generator, device=weight.device).to(dtype)
            chosen = torch.randint(count, (tokens, 2), generator=generator, device=weight.device)
            shares = torch.rand(tokens, 2, generator=generator, device=weight.device).to(dtype)
            wanted, actual = (each(x, chosen, shares).float() for each in (experts, GroupedExperts(experts)))
            error = float((actual - wanted).norm() / wanted.norm().clamp(min=1e-30))
            if not error <= _TOLERANCE[dtype]:
                return f"the kernel of experts is off by {error:.2g} for {tokens} tokens"
    except Exception as error:  # of a compiler, of a driver, of a library that is too old or missing
        return f"the kernel of experts fails ({type(error).__name__}: {error})"
    return None
