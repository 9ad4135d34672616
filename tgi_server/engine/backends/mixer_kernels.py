"""Mixers of `transformers` that a kernel of the CPU computes in one call, between their projections."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import torch
from torch import Tensor, nn

from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.layer import plain_linear
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.models.spec import MixerSpec
from tgi_server.engine.parallel.layers import RowParallel, ShardedGatedNorm, ShardedLayer

# Shape and dtype of one slot's states, by the name of the function that has them; None: the dtype of the model.
_Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype | None]]


# Possible numbers of parts of a Mamba layer's channels, which threads compute in parallel; the first divisor is used.
_MAMBA_PARTS = (16, 8, 4, 2, 1)

# How a `torch.classes.oatmill.Mixer` is made: the name of a function there, and its arguments. A linear layer stands
# for its kernel.
_Recipe: TypeAlias = tuple[str, tuple[Any, ...]]
# A recipe, and the linear layers in it that adapters may change, by their names.
_Made: TypeAlias = tuple[_Recipe, dict[str, PackedLinear]]


@dataclass(frozen=True, slots=True)
class MixerKernel:
    """Computes one mixer between its projections. layer: its index.

    recipe: the kernel's name, and its arguments. inner: linear layers in between, by their names.
    """

    recipe: _Recipe
    inner: dict[str, PackedLinear]
    layer: int
    shapes: _Shapes

    def kernel(self) -> Any:
        """Returns a `torch.classes.oatmill.Mixer`. Raises UnsupportedModel for parts that are summed over shards."""
        name, arguments = self.recipe
        if any(isinstance(each, ShardedLayer) for each in arguments):
            raise UnsupportedModel("shards have parts of the same group in layers with states")
        kernels = (each.kernel() if isinstance(each, PackedLinear) else each for each in arguments)
        return getattr(torch.classes.oatmill.Mixer, name)(*kernels)

    @classmethod
    def of(cls, spec: MixerSpec, layer: nn.Module, linear: LinearFactory) -> Self | None:
        """Returns the kernel of a mixer in a layer of `transformers`; None if there is none for its parts.

        linear: packs the linear layers between the projections.
        """
        mixer: Any = layer.get_submodule(spec.name)
        if getattr(mixer, "activation", "silu") not in ("silu", "swish"):
            return None
        make, shapes = _KERNELS[spec.kernel]
        made = make(spec, mixer, linear)
        return None if made is None else cls(*made, mixer.layer_idx, shapes(mixer))

    def states(self, states: SequenceStates, dtype: torch.dtype) -> list[Tensor]:
        """Returns the states of all slots, in the kernel's order. dtype: the model's dtype."""
        return [states.all_slots((self.layer, name), shape, own or dtype) for name, (shape, own) in self.shapes.items()]


def _delta_net(spec: MixerSpec, mixer: Any, _: LinearFactory) -> _Made | None:
    if mixer.conv1d.bias is not None:
        return None
    gated_norm = mixer.get_submodule(spec.norm)
    rate_scale = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
    arguments = (
        mixer.num_k_heads,
        spec.grouped,
        _taps(mixer.conv1d),
        -mixer.A_log.float().exp(),
        mixer.dt_bias.float(),
        rate_scale,
        gated_norm.weight.float(),
        gated_norm.variance_epsilon,
    )
    return (spec.kernel, arguments), {}


def _kimi(spec: MixerSpec, mixer: Any, linear: LinearFactory) -> _Made | None:
    gate = mixer.forget_gate
    if not linear.takes(gate.f_b_proj) or not linear.takes(mixer.g_b_proj):
        return None
    inner = {"forget_gate.f_b_proj": linear(gate.f_b_proj), "g_b_proj": linear(mixer.g_b_proj)}
    arguments = (
        _taps(mixer.conv1d),
        *inner.values(),
        -gate.A_log.float().exp().flatten(),
        gate.dt_bias.float(),
        mixer.get_submodule(spec.norm).weight.float(),
        mixer.get_submodule(spec.norm).variance_epsilon,
    )
    return (spec.kernel, arguments), inner


def _states_of_kimi(mixer: Any) -> _Shapes:
    recurrent = mixer.forget_gate.A_log.numel(), mixer.head_dim, mixer.head_dim
    return _states_of_convolution(mixer.conv1d) | {"chunk_kimi_delta_attention": (recurrent, torch.float32)}


def _states_of_delta_net(mixer: Any) -> _Shapes:
    recurrent = mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim
    return _states_of_convolution(mixer.conv1d) | {"torch_chunk_gated_delta_rule": (recurrent, torch.float32)}


def _mamba2(spec: MixerSpec, mixer: Any, _: LinearFactory) -> _Made | None:
    norm, (least, most) = mixer.get_submodule(spec.norm), mixer.time_step_limit
    sharded = norm if isinstance(norm, ShardedGatedNorm) and norm.share.copies > 1 else None
    norm = norm.inner if isinstance(norm, ShardedGatedNorm) else norm
    plain = isinstance(norm, nn.Identity)
    size = mixer.num_heads * mixer.head_dim
    groups = getattr(norm, "n_groups", None)  # of Falcon-H1; the others count the features of a group
    group = size // groups if groups else getattr(norm, "group_size", size)
    arguments = (
        _taps(mixer.conv1d),
        _bias(mixer.conv1d),
        -mixer.A_log.float().exp(),
        mixer.D.float(),
        mixer.dt_bias.float(),
        float(least),
        float(most),
        None if plain else sharded or norm.weight.float(),
        0.0 if plain else norm.variance_epsilon,
        group,
        not getattr(norm, "norm_before_gate", False),
        mixer.n_groups,
    )
    return (spec.kernel, arguments), {}


def _states_of_mamba2(mixer: Any) -> _Shapes:
    recurrent = mixer.num_heads, mixer.ssm_state_size, mixer.head_dim
    return _states_of_convolution(mixer.conv1d) | {"mamba2_chunk_scan": (recurrent, torch.float32)}


def _mamba(spec: MixerSpec, mixer: Any, linear: LinearFactory) -> _Made | None:
    steps = mixer.dt_proj.unpacked() if isinstance(mixer.dt_proj, QuantizedLinear) else mixer.dt_proj
    own = mixer.x_proj.inner if isinstance(mixer.x_proj, RowParallel) else mixer.x_proj
    if not linear.takes(own) or type(steps) is not nn.Linear or steps.bias is None:
        return None
    packed = linear(own)
    inner = packed if own is mixer.x_proj else RowParallel(packed, mixer.x_proj.group, mixer.x_proj.share)
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
    return (spec.kernel, arguments), {"x_proj": packed}


def _states_of_mamba(mixer: Any) -> _Shapes:
    channels, size = mixer.A_log.shape
    parts = next(each for each in _MAMBA_PARTS if channels % each == 0)
    recurrent = parts, size, channels // parts
    return _states_of_convolution(mixer.conv1d) | {"mamba_selective_scan": (recurrent, torch.float32)}


def _short_convolution(spec: MixerSpec, mixer: Any, _: LinearFactory) -> _Made:
    return (spec.kernel, (_taps(mixer.conv), _bias(mixer.conv))), {}


def _taps(convolution: Any) -> Tensor:
    """Returns the taps, [width, channels]."""
    taps: Tensor = convolution.weight.squeeze(1).float().t().contiguous()
    return taps


def _bias(convolution: Any) -> Tensor | None:
    return None if convolution.bias is None else convolution.bias.float()


def _states_of_convolution(module: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype | None]]:
    channels, _, width = module.weight.shape
    return {"causal_conv1d_fn": ((width - 1, channels), None)}


# For each mixer's name in specs, two functions. The first returns the recipe of the mixer's kernel and the linear
# layers in it that adapters may change, or None if there is no kernel for its parts. The second returns the shapes of
# the mixer's states, in the kernel's order.
_KERNELS: Mapping[str, tuple[Callable[[MixerSpec, Any, LinearFactory], _Made | None], Callable[[Any], _Shapes]]] = {
    "gated_delta_net": (_delta_net, _states_of_delta_net),
    "kimi_delta_attention": (_kimi, _states_of_kimi),
    "mamba": (_mamba, _states_of_mamba),
    "mamba2": (_mamba2, _states_of_mamba2),
    "short_convolution": (_short_convolution, lambda mixer: _states_of_convolution(mixer.conv)),
}
