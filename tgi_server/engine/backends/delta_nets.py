"""Gated delta nets: the CPU's kernels compute all that lies between their projections in one call."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tgi_server.engine.backends.layer_kernels import are_plain
from tgi_server.engine.backends.recurrent import Runs
from tgi_server.engine.backends.states import SequenceStates

_Projected: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the modules of a layer of one family.

    projections: of query, key and value (together, or one each), the gate of the norm, rates and decays. If there are
    two, each has parts for each key head: of all but rates and decays, and of these.
    """

    projections: tuple[str, ...]
    norm: str = "norm"
    output: str = "out_proj"

    @property
    def by_key_head(self) -> bool:
        return len(self.projections) == 2


_QWEN3_5 = _Names(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
# By the name of the mixer's class in `transformers`.
_FAMILIES = {
    "Qwen3NextGatedDeltaNet": _Names(("in_proj_qkvz", "in_proj_ba")),
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
    "OlmoHybridGatedDeltaNet": _Names(("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_norm", "o_proj"),
}


class GatedDeltaNet:
    """Computes a layer of one of the families above."""

    def __init__(self, mixer: Any) -> None:
        self._mixer = mixer
        self._names = _FAMILIES[type(mixer).__name__]
        self._kernel: Any = None

    @staticmethod
    def fits(mixer: Any) -> bool:
        """Returns True if the kernel computes such a layer."""
        return type(mixer).__name__ in _FAMILIES and mixer.conv1d.bias is None and mixer.activation in ("silu", "swish")

    @cached_property
    def _weights(self) -> tuple[Tensor, Tensor, Tensor, float, Tensor, float]:
        """The kernel's weights beside linear layers: of the convolution, of decays and rates, and of the norm."""
        mixer, norm = self._mixer, getattr(self._mixer, self._names.norm)
        taps = mixer.conv1d.weight.squeeze(1).float().t().contiguous()
        scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
        gates = -mixer.A_log.float().exp(), mixer.dt_bias.float(), scale
        return taps, *gates, norm.weight.float(), norm.variance_epsilon

    def states(self, states: SequenceStates, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the states of all slots: those of the convolution, and those of the delta rule."""
        mixer, taps = self._mixer, self._weights[0]
        layer = int(mixer.layer_idx)
        shape = mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
        return (
            states.all_slots((layer, "causal_conv1d_fn"), (taps.shape[0] - 1, taps.shape[1]), dtype),
            states.all_slots((layer, "torch_chunk_gated_delta_rule"), shape, torch.float32),
        )

    def project(self, x: Tensor) -> _Projected:
        """Returns what the kernel takes of each token. x: [1, tokens, hidden_size]."""
        mixer = self._mixer
        parts = [getattr(mixer, name)(x) for name in self._names.projections]
        if self._names.by_key_head:
            parts = mixer.fix_query_key_value_ordering(*parts)
        *mixed, gate, rates, decays = parts
        joined = torch.cat([each.flatten(2) for each in mixed], dim=-1) if len(mixed) > 1 else mixed[0]
        gate = gate.reshape(1, x.shape[1], -1, mixer.head_v_dim)
        return {"mixed": joined, "gate": gate, "rates": rates, "decays": decays}

    def compute(self, states: SequenceStates, inputs: _Projected, runs: Runs) -> Tensor:
        """Returns the input of the last projection, [1, tokens, size]. inputs: of `project`."""
        mixed, gate, rates, decays = (inputs[name][0] for name in ("mixed", "gate", "rates", "decays"))
        convolved, recurrent = self.states(states, mixed.dtype)
        taps, bases, bias, scale, weight, eps = self._weights
        gates = decays, rates, bases, bias, scale, gate, weight, eps
        places = recurrent, runs.runs, runs.saves
        return torch.ops.oatmill.gated_delta_net(mixed, taps, convolved, *gates, *places).unsqueeze(0)

    def output(self, x: Tensor) -> Tensor:
        projected: Tensor = getattr(self._mixer, self._names.output)(x)
        return projected

    def layer(self, states: SequenceStates, x: Tensor, runs: Runs) -> Tensor | None:
        """Computes the layer with its projections in one call; None if something happens in between."""
        linears = [getattr(self._mixer, name) for name in (*self._names.projections, self._names.output)]
        if not are_plain(linears):
            return None
        if self._kernel is None:
            *projections, output = (each.kernel() for each in linears)
            self._kernel = torch.classes.oatmill.GatedDeltaNet(projections, output, *self._groups, *self._weights)
        computed: Tensor = self._kernel.forward(x[0], *self.states(states, x.dtype), runs.runs, runs.saves)
        return computed.unsqueeze(0)

    @property
    def _groups(self) -> tuple[list[int], int]:
        """Returns the first projection's outputs for each key head, if it has such, and the number of key heads."""
        mixer = self._mixer
        size, of_values = mixer.head_k_dim, mixer.num_v_heads // mixer.num_k_heads * mixer.head_v_dim
        return [size, size, of_values, of_values] if self._names.by_key_head else [], mixer.num_k_heads
