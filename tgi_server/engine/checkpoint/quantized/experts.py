"""The experts of a mixture as linear layers, one by one, for weights that are quantised or packed."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from tgi_server.engine.checkpoint.quantized.layer import QuantizedLinear

# By their names in the kernels.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
}


class Experts(nn.Module):
    """A layer's experts, in place of the module of `transformers` that has the weights of all in two tensors.

    gate_up: for each expert the linear layers whose concatenated outputs go through the gate or the activation. down:
    for each expert the linear layer after these.
    """

    gate_up_proj_bias: Tensor | None
    down_proj_bias: Tensor | None

    def __init__(
        self, stacked: Any, gate_up: Callable[[Tensor], Iterable[nn.Module]], down: Callable[[Tensor], nn.Module]
    ) -> None:
        """stacked: the module to replace. gate_up, down: make an expert's layers of its weight, [outputs, inputs]."""
        super().__init__()
        self._stacked = (stacked,)  # in a tuple, since it is not a part of this module
        self._clamps = (float(stacked.alpha), float(stacked.limit)) if hasattr(stacked, "alpha") else None
        self._kernel: Any = None
        transposed, first = stacked.is_transposed, _first(stacked)
        self.gate_up = nn.ModuleList(nn.ModuleList(gate_up(w.T if transposed else w)) for w in getattr(stacked, first))
        self.down = nn.ModuleList(down(w.T if transposed else w) for w in stacked.down_proj)
        # [experts, outputs], where there are any
        self.register_parameter("gate_up_proj_bias", getattr(stacked, f"{first}_bias", None))
        self.register_parameter("down_proj_bias", getattr(stacked, "down_proj_bias", None))
        delattr(stacked, first)
        del stacked.down_proj

    @property
    def _gate(self) -> Callable[[Tensor], Tensor]:
        stacked = self._stacked[0]
        gate: Callable[[Tensor], Tensor] = stacked._apply_gate if stacked.has_gate else stacked.act_fn
        return gate

    @classmethod
    def quantized(cls, stacked: Any, parts: int) -> Self:
        """Returns experts without weights yet. parts: the layers of an expert in `gate_up`, of equal size."""

        def linear(weight: Tensor, parts: int = 1) -> QuantizedLinear:
            outputs, inputs = weight.shape
            return QuantizedLinear(nn.Linear(inputs, outputs // parts, bias=False, dtype=weight.dtype, device="meta"))

        return cls(stacked, lambda weight: [linear(weight, parts) for _ in range(parts)], linear)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Returns True for experts that are a gate or an activation between two linear layers, and nothing else."""
        plain = hasattr(module, "has_gate") and not getattr(module, "has_post_expert_norm", False)
        tensors = (getattr(module, name, None) for name in (_first(module), "down_proj")) if plain else (None,)
        return all(isinstance(tensor, nn.Parameter) for tensor in tensors)

    def kernel(self) -> Any:
        """Returns a `torch.classes.oatmill.Experts`; None if that does not support these experts."""
        facts = self._activation()
        if facts is None or (not facts[2] and self.gate_up_proj_bias is not None):
            return None
        kernel = torch.classes.oatmill.Experts(*facts)
        biases = (self.gate_up_proj_bias, self.down_proj_bias)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            made = [getattr(layer, "kernel", lambda: None)() for layer in (*cast(nn.ModuleList, gate_up), down)]
            if len(made) != 2 or any(layer is None for layer in made):
                return None
            kernel.add(*made, *(None if bias is None else bias[expert].float() for bias in biases))
        return kernel

    def _activation(self) -> tuple[str, bool, float, float] | None:
        """Returns arguments of `torch.classes.oatmill.Experts`; None if it does not support the activation."""
        gated = bool(self._stacked[0].has_gate)
        given = torch.linspace(-9, 9, 8).unsqueeze(0)
        gate, other = given.chunk(2, -1) if gated else (given, torch.ones(()))
        actual = self._gate(given)
        for name, activation in ACTIVATIONS.items():
            if torch.allclose(actual, activation(gate) * other):
                return name, gated, 0.0, 0.0
        if self._clamps is None:
            return None
        alpha, limit = self._clamps
        gate, other = given[:, ::2].clamp(max=limit), given[:, 1::2].clamp(-limit, limit)
        known = torch.allclose(actual, (other + 1) * gate * torch.sigmoid(alpha * gate))
        return ("silu", gated, alpha, limit) if known else None

    def use_kernel(self, *, wanted: bool) -> None:
        """Computes all experts in one call from now on, if `wanted` and if the kernel can."""
        self._kernel = self.kernel() if wanted else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kernel": None}

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Returns the sum of each token's experts' outputs, [tokens, hidden_size], for inputs of the same shape.

        chosen: the experts of each token, [tokens, experts of a token] int64. shares: their weights, of the same shape.
        """
        if self._kernel is not None:
            summed: Tensor = self._kernel.forward(hidden, chosen.contiguous(), shares.contiguous())
            return summed
        result = torch.zeros_like(hidden)
        places = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(self.down)).tolist()
        first = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            own = places[first : first + count]
            first += count
            tokens = own // chosen.shape[1]
            output = self._output(expert, hidden[tokens]) * shares.flatten()[own].unsqueeze(1)
            result.index_add_(0, tokens, output.to(hidden.dtype))
        return result

    def _output(self, expert: int, x: Tensor) -> Tensor:
        widened = torch.cat([linear(x) for linear in cast(nn.ModuleList, self.gate_up[expert])], -1)
        if self.gate_up_proj_bias is not None:
            widened = widened + self.gate_up_proj_bias[expert]
        output = self.down[expert](self._gate(widened))
        return output if self.down_proj_bias is None else output + self.down_proj_bias[expert]


def _first(stacked: nn.Module) -> str:
    """Returns the name of the first weight of the experts of `transformers`."""
    return "gate_up_proj" if getattr(stacked, "has_gate", False) else "up_proj"
