"""Mixers of `transformers` that a kernel of the CPU computes in one call, between their projections."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.layer import plain_linear
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.parallel.layers import ShardedGatedNorm

# Shape and dtype of one slot's states, by the name of the function that has them; None: the dtype of the model.
_Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]


# Parts of a Mamba layer's channels that threads compute by themselves: as many as divide its channels.
_MAMBA_PARTS = (16, 8, 4, 2, 1)

# How a `torch.classes.oatmill.Mixer` is made: the name of a function there, and its arguments. A linear layer stands
# for its kernel.
_Recipe: TypeAlias = tuple[str, tuple[Any, ...]]
# A recipe, and the linear layers in it that adapters may change, by their names.
_Made: TypeAlias = tuple[_Recipe, dict[str, PackedLinear]]


@dataclass(frozen=True, slots=True)
class _Family:
    """The mixers of some families.

    projections: the names of the first ones, whose outputs stand side by side for the kernel. make: returns the recipe
    of a mixer's kernel, and the linear layers in it that adapters may change. It takes what packs linear layers, and
    returns None if there is no kernel. shapes: of a mixer's states, in the order
    in which the kernel takes them. output: the name of the last projection.
    """

    projections: tuple[str, ...]
    make: Callable[[Any, LinearFactory], _Made | None]
    shapes: Callable[[Any], _Shapes]
    output: str = "out_proj"


@dataclass(frozen=True, slots=True)
class MixerKernel:
    """Computes one mixer between its projections. projections, output: their names in the mixer. layer: its index.

    inner: linear layers in between, by their names. kernel: a `torch.classes.oatmill.Mixer`.
    """

    projections: tuple[str, ...]
    output: str
    _recipe: _Recipe
    inner: dict[str, PackedLinear]
    layer: int
    _shapes: _Shapes
    kernel: Any = field(init=False)

    def __post_init__(self) -> None:
        name, arguments = self._recipe
        kernels = (each.kernel() if isinstance(each, PackedLinear) else each for each in arguments)
        object.__setattr__(self, "kernel", getattr(torch.classes.oatmill.Mixer, name)(*kernels))

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies anew: objects of `torch.classes` cannot be pickled."""
        return type(self), (self.projections, self.output, self._recipe, self.inner, self.layer, self._shapes)

    @classmethod
    def of(cls, mixer: Any, linear: LinearFactory) -> Self | None:
        """Returns the kernel of a mixer of `transformers`; None if there is none. linear: packs layers in between."""
        family = _FAMILIES.get(type(mixer).__name__)
        if family is None or getattr(mixer, "activation", "silu") not in ("silu", "swish"):
            return None
        made = family.make(mixer, linear)
        shapes = family.shapes(mixer)
        return None if made is None else cls(family.projections, family.output, *made, mixer.layer_idx, shapes)

    def states(self, states: SequenceStates, dtype: torch.dtype) -> list[Tensor]:
        """Returns the states of all slots, in the order in which the kernel takes them. dtype: of the model."""
        return [
            states.all_slots((self.layer, name), shape, own or dtype) for name, (shape, own) in self._shapes.items()
        ]


def _delta_net(mixer: Any, norm: str = "norm", *, grouped: bool = False) -> _Recipe | None:
    if mixer.conv1d.bias is not None:
        return None
    gated_norm = getattr(mixer, norm)
    rate_scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
    return "gated_delta_net", (
        mixer.num_k_heads,
        grouped,
        _taps(mixer.conv1d),
        -mixer.A_log.float().exp(),
        mixer.dt_bias.float(),
        rate_scale,
        gated_norm.weight.float(),
        gated_norm.variance_epsilon,
    )


def _kimi(mixer: Any, linear: LinearFactory) -> _Made | None:
    gate = mixer.forget_gate
    if not linear.takes(gate.f_b_proj) or not linear.takes(mixer.g_b_proj):
        return None
    inner = {"forget_gate.f_b_proj": linear(gate.f_b_proj), "g_b_proj": linear(mixer.g_b_proj)}
    arguments = (
        _taps(mixer.conv1d),
        *inner.values(),
        -gate.A_log.float().exp().flatten(),
        gate.dt_bias.float(),
        mixer.o_norm.weight.float(),
        mixer.o_norm.variance_epsilon,
    )
    return ("kimi_delta_attention", arguments), inner


def _states_of_kimi(mixer: Any) -> _Shapes:
    recurrent = mixer.forget_gate.A_log.numel(), mixer.head_dim, mixer.head_dim
    return _states_of_convolution(mixer.conv1d) | {"chunk_kimi_delta_attention": (recurrent, torch.float32)}


def _states_of_delta_net(mixer: Any) -> _Shapes:
    recurrent = mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    return _states_of_convolution(mixer.conv1d) | {"torch_chunk_gated_delta_rule": (recurrent, torch.float32)}


def _mamba2(mixer: Any) -> _Recipe | None:
    norm, (least, most) = mixer.norm, mixer.time_step_limit
    if isinstance(norm, ShardedGatedNorm):
        if norm.share.copies > 1:
            return None
        norm = norm.inner
    plain = isinstance(norm, nn.Identity)
    size = mixer.num_heads * mixer.head_dim
    groups = getattr(norm, "n_groups", None)  # of Falcon-H1; the others count the features of a group
    group = size // groups if groups else getattr(norm, "group_size", size)
    return "mamba2", (
        _taps(mixer.conv1d),
        _bias(mixer.conv1d),
        -mixer.A_log.float().exp(),
        mixer.D.float(),
        mixer.dt_bias.float(),
        float(least),
        float(most),
        None if plain else norm.weight.float(),
        0.0 if plain else norm.variance_epsilon,
        group,
        not getattr(norm, "norm_before_gate", False),
        mixer.n_groups,
    )


def _states_of_mamba2(mixer: Any) -> _Shapes:
    recurrent = mixer.num_heads, mixer.ssm_state_size, mixer.head_dim
    return _states_of_convolution(mixer.conv1d) | {"mamba2_chunk_scan": (recurrent, torch.float32)}


def _mamba(mixer: Any, linear: LinearFactory) -> _Made | None:
    steps = mixer.dt_proj.unpacked() if isinstance(mixer.dt_proj, QuantizedLinear) else mixer.dt_proj
    if not linear.takes(mixer.x_proj) or type(steps) is not nn.Linear or steps.bias is None:
        return None
    inner = linear(mixer.x_proj)
    norms = [getattr(mixer, f"{name}_layernorm") for name in ("dt", "b", "c")]
    arguments = (
        _taps(mixer.conv1d),
        _bias(mixer.conv1d),
        inner,
        [norm.weight for norm in norms],
        norms[0].variance_epsilon,
        linear(plain_linear(steps.weight, None)),
        steps.bias.to(steps.weight.dtype),
        -mixer.A_log.float().exp().t().contiguous(),
        mixer.D.float(),
    )
    return ("mamba", arguments), {"x_proj": inner}


def _states_of_mamba(mixer: Any) -> _Shapes:
    channels, size = mixer.A_log.shape
    parts = next(each for each in _MAMBA_PARTS if channels % each == 0)
    recurrent = parts, size, channels // parts
    return _states_of_convolution(mixer.conv1d) | {"mamba_selective_scan": (recurrent, torch.float32)}


def _short_convolution(mixer: Any) -> _Recipe:
    return "short_convolution", (_taps(mixer.conv), _bias(mixer.conv))


def _alone(make: Callable[[Any], _Recipe | None]) -> Callable[[Any, LinearFactory], _Made | None]:
    """Returns what makes the recipes of kernels without linear layers in them."""

    def made(mixer: Any, _: LinearFactory) -> _Made | None:
        recipe = make(mixer)
        return None if recipe is None else (recipe, {})

    return made


def _taps(convolution: Any) -> Tensor:
    """Returns the taps, [width, channels]."""
    taps: Tensor = convolution.weight.squeeze(1).float().t().contiguous()
    return taps


def _bias(convolution: Any) -> Tensor | None:
    return None if convolution.bias is None else convolution.bias.float()


def _states_of_convolution(module: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    channels, _, width = module.weight.shape
    return {"causal_conv1d_fn": ((width - 1, channels), None)}


_QWEN3_NEXT = _Family(("in_proj_qkvz", "in_proj_ba"), _alone(partial(_delta_net, grouped=True)), _states_of_delta_net)
_QWEN3_5 = _Family(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), _alone(_delta_net), _states_of_delta_net)
_OLMO = _Family(
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
    _alone(partial(_delta_net, norm="o_norm")),
    _states_of_delta_net,
    "o_proj",
)
_KIMI = _Family(
    ("q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "g_a_proj", "b_proj"), _kimi, _states_of_kimi, "o_proj"
)
_MAMBA = _Family(("in_proj",), _mamba, _states_of_mamba)
_MAMBA2 = _Family(("in_proj",), _alone(_mamba2), _states_of_mamba2)
_SHORT = _Family(("in_proj",), _alone(_short_convolution), lambda mixer: _states_of_convolution(mixer.conv))
# By the name of the mixer's class in `transformers`.
_FAMILIES = {
    "Qwen3NextGatedDeltaNet": _QWEN3_NEXT,
    "Qwen3_5GatedDeltaNet": _QWEN3_5,
    "Qwen3_5MoeGatedDeltaNet": _QWEN3_5,
    "OlmoHybridGatedDeltaNet": _OLMO,
    "KimiLinearDeltaAttention": _KIMI,
    "JambaMambaMixer": _MAMBA,
    "BambaMixer": _MAMBA2,
    "FalconH1Mixer": _MAMBA2,
    "GraniteMoeHybridMambaLayer": _MAMBA2,
    "NemotronHMamba2Mixer": _MAMBA2,
    "Lfm2ShortConv": _SHORT,
    "Lfm2MoeShortConv": _SHORT,
}
