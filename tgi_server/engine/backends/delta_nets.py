"""Gated delta nets, of which the CPU's kernels compute in one call all that lies between their projections."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tgi_server.engine.backends.recurrent import Runs, StatesOf

_Projected: TypeAlias = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a layer of one family.

    project: returns, of [1, tokens, hidden_size], `mixed`: queries, keys and values side by side; `gate`, of the norm;
    `rates` and `decays`, [1, tokens, heads]. norm, output: names of its last two modules.
    """

    project: Callable[[Any, Tensor], _Projected]
    norm: str = "norm"
    output: str = "out_proj"


def _qwen3_next(mixer: Any, x: Tensor) -> _Projected:
    projected = mixer.in_proj_qkvz(x), mixer.in_proj_ba(x)
    query, key, value, gate, rates, decays = mixer.fix_query_key_value_ordering(*projected)
    mixed = torch.cat([query.flatten(2), key.flatten(2), value.flatten(2)], dim=-1)
    return {"mixed": mixed, "gate": gate, "rates": rates, "decays": decays}


def _qwen3_5(mixer: Any, x: Tensor) -> _Projected:
    projected = mixer.in_proj_qkv(x), mixer.in_proj_z(x), mixer.in_proj_b(x), mixer.in_proj_a(x)
    return dict(zip(("mixed", "gate", "rates", "decays"), projected, strict=True))


def _olmo_hybrid(mixer: Any, x: Tensor) -> _Projected:
    mixed = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], dim=-1)
    return {"mixed": mixed, "gate": mixer.g_proj(x), "rates": mixer.b_proj(x), "decays": mixer.a_proj(x)}


# By the name of the mixer's class in `transformers`.
_FAMILIES = {
    "Qwen3NextGatedDeltaNet": _Parts(_qwen3_next),
    "Qwen3_5GatedDeltaNet": _Parts(_qwen3_5),
    "Qwen3_5MoeGatedDeltaNet": _Parts(_qwen3_5),
    "OlmoHybridGatedDeltaNet": _Parts(_olmo_hybrid, "o_norm", "o_proj"),
}


class GatedDeltaNet:
    """Computes a layer of one of the families above."""

    def __init__(self, mixer: Any) -> None:
        self._mixer = mixer
        self._parts = _FAMILIES[type(mixer).__name__]
        self._weights: tuple[Tensor, ...] = ()

    @staticmethod
    def fits(mixer: Any) -> bool:
        """Returns True if the kernel computes such a layer."""
        return type(mixer).__name__ in _FAMILIES and mixer.conv1d.bias is None and mixer.activation in ("silu", "swish")

    def project(self, x: Tensor) -> _Projected:
        """Returns what the kernel takes of each token. x: [1, tokens, hidden_size]."""
        projected = self._parts.project(self._mixer, x)
        return projected | {"gate": projected["gate"].reshape(1, x.shape[1], -1, self._mixer.head_v_dim)}

    def __call__(self, convolved: StatesOf, states: StatesOf, inputs: Mapping[str, Tensor], runs: Runs) -> Tensor:
        """Returns the input of `output` for each token. convolved: states of the convolution. inputs: of `project`."""
        mixer, norm = self._mixer, getattr(self._mixer, self._parts.norm)
        if not self._weights:
            taps = mixer.conv1d.weight.squeeze(1).float().t().contiguous()
            self._weights = taps, -mixer.A_log.float().exp(), mixer.dt_bias.float(), norm.weight.float()
        taps, bases, bias, weight = self._weights
        mixed, gate, rates, decays = (inputs[name][0] for name in ("mixed", "gate", "rates", "decays"))
        before = convolved((taps.shape[0] - 1, taps.shape[1]), mixed.dtype)
        state = states((mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim), torch.float32)
        scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
        gates = decays, rates, bases, bias, scale, gate, weight, norm.variance_epsilon
        output: Tensor = torch.ops.oatmill.gated_delta_net(mixed, taps, before, *gates, state, runs.runs, runs.saves)
        return output.unsqueeze(0)

    def output(self, x: Tensor) -> Tensor:
        projected: Tensor = getattr(self._mixer, self._parts.output)(x)
        return projected
