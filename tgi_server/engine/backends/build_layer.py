"""Builds a layer by its spec from the modules of `transformers`, packed for a device."""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.backends.alibi import slopes_of
from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.latents import latents_of
from tgi_server.engine.backends.decoder import (
    AltUpLayer,
    AttentionHeads,
    DecoderLayer,
    LatentLayers,
    Norm,
    Unfit,
    inner,
)
from tgi_server.engine.backends.mixer_kernels import MixerKernel
from tgi_server.engine.checkpoint.quantized import Experts, QuantizedLinear
from tgi_server.engine.checkpoint.quantized.layer import plain_linear
from tgi_server.engine.linear import LinearFactory, PackedLinear
from tgi_server.engine.linear.blas import BlasLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.memory import HOST
from tgi_server.engine.models.spec import DecoderSpec, LayerSpec
from tgi_server.engine.parallel.layers import RowParallel, ShardedLayer, VocabParallelHead

# The norms of LayerSpec, in the order of a layer's steps.
_NORMS = (
    *("attention_norm", "token_norm", "query_norm", "key_norm", "value_norm", "attended_norm", "feed_forward_norm"),
    *("mixture_norm", "router_norm", "mixed_norm", "shared_norm", "fed_norm", "input_norm"),
)
# The norms of heads, which a layer without attention does not have.
_OF_ATTENTION = ("query_norm", "key_norm", "value_norm")
# Linear layers of a layer of Gemma 3n, for its streams of hidden states.
_OF_ALTUP = (
    *("altup.modality_router", "altup.prediction_coefs", "altup.correction_coefs"),
    *("laurel.linear_left", "laurel.linear_right"),
)


def build_layer(
    module: nn.Module,
    number: int,
    spec: LayerSpec,
    variant: AttentionVariant | None,
    mixer: MixerKernel | None,
    linear: LinearFactory,
) -> DecoderLayer:
    """Returns a layer with the weights of one of `transformers`; those of a mixture are not packed yet."""
    linears: dict[str, Any] = {}
    parts: dict[str, list[tuple[str, int]]] = {}
    scales: dict[str, Tensor] = {}
    for kind, names in _linear_names(spec).items():
        own = [_linear(module, name) for name in names]
        parts[kind] = [(name, _outputs(own_linear)) for name, own_linear in zip(names, own, strict=True)]
        linears[kind] = _joined(own, linear)
        if spec.scales.keys() & set(names):
            scales[kind] = torch.cat([_scales(module, spec, *own_linear) for own_linear in parts[kind]])
    heads, latents = None, None
    if spec.attends and spec.attention is not None:
        attention = module.get_submodule(spec.attention)
        index = linears["index_key"].out_features if "index_key" in linears else 0
        latents = _latents(attention, index) if spec.latents else None
        heads = _heads(attention, spec, linears) if latents is None else _heads_of(latents)
        variant = _variant(attention, spec, heads, variant)
    else:
        variant = None
    return DecoderLayer(
        spec,
        number,
        linears,
        parts,
        scales,
        _norms(module, spec),
        heads=heads,
        variant=variant,
        latents=latents,
        mixer=mixer,
        mixture=_mixture(module, spec),
        scale=1.0 if spec.output_scale is None else float(module.get_buffer(spec.output_scale)),
        altup=_altup(module, linear) if hasattr(module, "altup") else None,
    )


def check_layers(modules: nn.ModuleList, spec: DecoderSpec, linear: LinearFactory) -> list[MixerKernel | None]:
    """Raises Unfit for a model that its spec does not describe. Returns the kernels of layers with states."""
    if len(modules) != len(spec.layers):
        raise Unfit(f"it has {len(modules)} layers, where its spec has {len(spec.layers)}")
    mixers = []
    for index, (module, layer) in enumerate(zip(modules, spec.layers, strict=True)):
        try:
            mixer = MixerKernel.of(layer.mixer, module, linear) if layer.mixer else None
            mixers.append(mixer)
            if layer.mixer and mixer is None:
                raise Unfit(f"there is no kernel for layer {index}, {layer.mixer.name}")
            parts = [[inner(_linear(module, name)) for name in names] for names in _linear_names(layer).values()]
            mixture = module.get_submodule(layer.mixture.name) if layer.mixture else None
            _norms(module, layer)
        except AttributeError as error:
            raise Unfit(f"layer {index}: {error}") from error
        mixed = mixture is None or hasattr(mixture, "experts")
        if not mixed or not all(linear.joins(*each) if len(each) > 1 else linear.takes(*each) for each in parts):
            raise Unfit(f"layer {index} is made of other parts than its spec says")
    return mixers


def _altup(layer: nn.Module, linear: LinearFactory) -> AltUpLayer:
    altup: Any = layer.get_submodule("altup")
    norms = Norm.of(altup.router_norm), Norm.of(layer.get_submodule("laurel.post_laurel_norm"))
    scale = altup.correct_output_scale.float() if altup.config.altup_correct_scale else None
    return AltUpLayer({name: linear(_linear(layer, name)) for name in _OF_ALTUP}, *norms, scale)


def _norms(module: nn.Module, spec: LayerSpec) -> dict[str, Norm]:
    """Returns the norms that a layer has, by their names in the spec."""
    norms: dict[str, Norm] = {}
    device = next(module.parameters()).device
    size = _head_size(module.get_submodule(spec.attention)) if spec.attends and spec.attention else 1
    for kind, name in _norm_names(spec).items():
        whole = norms["attention_norm"].size if "attention_norm" in norms else 1
        norms[kind] = Norm.of(module.get_submodule(name), size if kind in _OF_ATTENTION else whole, device)
    if spec.mixture and spec.mixture.router_scale:
        scale, norm = operator.attrgetter(spec.mixture.router_scale)(module).float(), norms["router_norm"]
        norms["router_norm"] = replace(norm, weight=norm.weight.float() * scale * len(scale) ** -0.5)
    return norms


def _mixture(layer: nn.Module, spec: LayerSpec) -> Any:
    """Returns a layer's mixture, with attributes of its experts that `Experts` needs; None if it has none."""
    if spec.mixture is None:
        return None
    mixture: Any = layer.get_submodule(spec.mixture.name)
    if mixture is layer:
        router = spec.mixture.router.partition(".")[0]
        mixture = nn.ModuleDict({name: layer.get_submodule(name) for name in ("experts", router)})
    experts = inner(mixture.experts)
    if spec.mixture.share_inputs and not isinstance(experts, Experts):  # of Llama 4, which take other inputs
        experts.has_gate, experts.is_transposed = True, True
        experts._apply_gate = partial(_gated, experts.act_fn)
        plain = Experts(experts, lambda weight: [plain_linear(weight, None)], lambda weight: plain_linear(weight, None))
        mixture.set_submodule("experts.inner" if isinstance(mixture.experts, RowParallel) else "experts", plain)
    return mixture


def _gated(activation: Callable[[Tensor], Tensor], joined: Tensor) -> Tensor:
    gate, up = joined.chunk(2, -1)
    return activation(gate) * up


def _scales(module: nn.Module, spec: LayerSpec, name: str, outputs: int) -> Tensor:
    """Returns the factors of a linear layer's outputs, [outputs] float32."""
    scale = spec.scales.get(name, 1.0)
    if isinstance(scale, tuple):
        return scale[0] * module.get_buffer(scale[1]).float().flatten()
    return torch.full((outputs,), scale, device=next(module.parameters()).device)


def _head_size(attention: Any) -> int:
    return int(getattr(attention, "head_dim", 0) or getattr(attention, "head_size", 1))


def _heads(attention: Any, spec: LayerSpec, linears: Mapping[str, Any]) -> AttentionHeads:
    size = _head_size(attention)
    of_value = int(getattr(attention, "v_head_dim", size))
    heads = inner(linears["output"]).in_features // of_value
    queries = 2 * heads if spec.gated else heads
    return AttentionHeads(heads, (linears["qkv"].out_features - queries * size) // (size + of_value), size, of_value)


def _variant(
    attention: nn.Module, spec: LayerSpec, heads: AttentionHeads, said: AttentionVariant | None
) -> AttentionVariant:
    """Returns how a layer attends. said: the variant with which it calls attention; None: it does not call it."""
    variant = said or AttentionVariant(scaling=heads.size**-0.5)
    scaling = variant.scaling if spec.scaling is None else spec.scaling
    variant = replace(
        variant,
        scaling=scaling,
        chunk=spec.chunk,
        window=spec.window or variant.window,
        chosen=spec.index.tokens if spec.index else 0,
    )
    if spec.alibi is None:
        return variant
    slopes = slopes_of(attention, heads.heads, spec.alibi).to(next(attention.parameters()).device)
    return replace(variant, alibi_slopes=slopes, rounded_alibi=spec.alibi == "rounded")


def _latents(attention: Any, index: int) -> LatentLayers:
    weights = latents_of(attention)
    on_cpu = weights.keys.device == HOST and FloatLinear.supports(weights.keys.dtype)
    kind = FloatLinear if on_cpu else BlasLinear
    keys, values = ([kind(weight.contiguous()) for weight in heads.mT] for heads in (weights.keys, weights.values))
    return LatentLayers(int(attention.qk_rope_head_dim), keys, values, index)


def _heads_of(latents: LatentLayers) -> AttentionHeads:
    """Returns the heads as the cache has them: one of keys, which are values, too."""
    size = latents.rotated + latents.keys[0].out_features
    return AttentionHeads(len(latents.keys), 1, size, size)


def _linear(layer: nn.Module, name: str) -> Any:
    """Returns a linear layer of a layer of `transformers`, as torch's class even if the model has its own class."""
    module = layer.get_submodule(name)
    own = inner(module)
    if isinstance(own, Conv1D):
        own = plain_linear(own.weight.t(), own.bias)
    elif isinstance(own, nn.Linear) and type(own) is not nn.Linear:
        own = plain_linear(own.weight, own.bias)
    return type(module)(own, module.group, module.share) if isinstance(module, RowParallel) else own


def _outputs(module: Any) -> int:
    """Returns the number of a linear layer's outputs, or of those that this shard has."""
    linear = inner(module)
    return int(linear.out_features) if isinstance(linear, QuantizedLinear) else len(linear.weight)


def _linear_names(spec: LayerSpec) -> dict[str, tuple[str, ...]]:
    """Returns the names in `transformers` of the parts of each linear layer."""
    names: dict[str, tuple[str, ...]] = {}
    if spec.attends:
        names = {"qkv": spec.qkv, "output": (spec.output,)} | ({"query": (spec.query,)} if spec.query else {})
        if spec.index is not None and not spec.index.shared:
            index = spec.index
            names |= {"index_query": (index.query,), "index_key": (index.key,), "index_weights": (index.weights,)}
    if (mixer := spec.mixer) is not None:
        names |= {
            "mixer_in": tuple(f"{mixer.name}.{name}" for name in mixer.projections),
            "mixer_out": (f"{mixer.name}.{mixer.output}",),
        }
    if spec.up and (spec.mixture is None or spec.shared):
        names |= {"up": spec.up, "down": (spec.down,)}
    others = {name: getattr(spec, name) for name in ("shared_gate", "input_gate", "input_projection")}
    return names | {name: (path,) for name, path in others.items() if path}


def _norm_names(spec: LayerSpec) -> dict[str, str]:
    """Returns the names in `transformers` of the existing norms, by their names in the spec."""
    norms = {kind: name for kind in _NORMS if (name := getattr(spec, kind)) is not None}
    if spec.index is not None and not spec.index.shared:
        norms["index_norm"] = spec.index.norm
    return norms if spec.attends else {kind: name for kind, name in norms.items() if kind not in _OF_ATTENTION}


def _joined(modules: list[Any], linear: LinearFactory) -> PackedLinear | RowParallel:
    """Returns one layer for linear layers with the same input."""
    return linear.joined(*modules) if len(modules) > 1 else in_parallel(modules[0], linear)


def in_parallel(module: Any, linear: LinearFactory) -> Any:
    """Returns the layer that replaces a linear layer; if that was inside a parallel layer, inside a new one."""
    if not isinstance(module, ShardedLayer):
        return linear(module)
    made = type(module)(linear(module.inner), module.group, module.share)
    if isinstance(module, VocabParallelHead):
        cast(VocabParallelHead, made).vocab_size = module.vocab_size
    return made
