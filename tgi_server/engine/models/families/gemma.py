"""Gemma 1 to 4, and VaultGemma: scaled embeddings, GELU for the gate.

In Gemma 3n and 4 the last layers may share the keys of earlier ones, and layers may have further inputs.
"""

from dataclasses import replace
from statistics import NormalDist
from typing import Any

from tgi_server.engine.models.spec import (
    DecoderSpec,
    Family,
    LayerInputs,
    LayerSpec,
    MixtureSpec,
    NoSpec,
    TwoWay,
    activation,
)
from tgi_server.engine.models.splits import EXPERTS, GATED, LLAMA, attention, heads_of, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, vocab_parallel_embedding

# From Gemma 2 on there are also norms after attention and after the feed-forward part.
_LAYER = LayerSpec(
    attended_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    fed_norm="post_feedforward_layernorm",
)


_INPUT: dict[str, Any] = {
    "input_gate": "per_layer_input_gate",
    "input_projection": "per_layer_projection",
    "input_norm": "post_per_layer_input_norm",
}


def _facts(config: Any, activation_name: str) -> dict[str, Any]:
    return {
        "activation": activation(activation_name),
        "embedding_scale": config.hidden_size**0.5,
        "logits_softcap": float(getattr(config, "final_logit_softcapping", None) or 0),
    }


def gemma(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(config, **_facts(config, config.hidden_act))


def gemma2(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(config, _LAYER, **_facts(config, config.hidden_activation))


def gemma3(config: Any) -> DecoderSpec:
    """Layers that look at all tokens have other rotary tables than those with a window."""
    layer = replace(_LAYER, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    spec = DecoderSpec.uniform(config, layer, **_facts(config, config.hidden_activation))
    return spec.rotary_by_type(config.layer_types)


def gemma3n(config: Any) -> DecoderSpec:
    """There are several streams of hidden states, and some feed-forward parts use only their largest features."""
    if config.altup_active_idx != 0:
        raise NoSpec("layers compute with another stream than the first")
    layer = replace(_LAYER, query_norm="self_attn.q_norm", **_INPUT)
    kinds = zip(config.layer_types, config.kv_sharing_modes, config.activation_sparsity_pattern, strict=True)
    layers = (
        replace(_with_keys(layer, config, kind, mode), deviations=NormalDist().inv_cdf(share) if share > 0 else None)
        for kind, mode, share in kinds
    )
    facts = _facts(config, config.hidden_activation)
    spec = DecoderSpec(tuple(layers), inputs=_layer_inputs(config), altup=True, **facts)
    return spec.rotary_by_type(config.layer_types)


def gemma4(config: Any) -> DecoderSpec:
    """Values are normalised, too. In some models layers without a window use their keys, before norms, as values.

    Beside the feed-forward part there may be a mixture, with norms of its own.
    """
    layer = replace(_LAYER, query_norm="self_attn.q_norm", output_scale="layer_scalar")
    if config.hidden_size_per_layer_input:
        layer = replace(layer, **_INPUT)
    if config.enable_moe_block:
        layer = replace(
            layer,
            mixture=_gemma4_mixture(config),
            shared=True,
            mixture_norm="pre_feedforward_layernorm_2",
            router_norm="router.norm",
            mixed_norm="post_feedforward_layernorm_2",
            shared_norm="post_feedforward_layernorm_1",
        )
    layers = (
        _with_keys(layer, config, kind, mode)
        for kind, mode in zip(config.layer_types, config.kv_sharing_modes, strict=True)
    )
    inputs = _layer_inputs(config) if config.hidden_size_per_layer_input else None
    spec = DecoderSpec(tuple(layers), inputs=inputs, **_facts(config, config.hidden_activation))
    return spec.rotary_by_type(config.layer_types)


def _with_keys(layer: LayerSpec, config: Any, kind: str, mode: str | None) -> LayerSpec:
    """Returns a layer with keys and values of its own, unless it uses those of an earlier layer."""
    if mode == "reuse":
        return replace(layer, qkv=("self_attn.q_proj",))
    value = "k_proj" if getattr(config, "attention_k_eq_v", False) and kind == "full_attention" else "v_proj"
    qkv = ("self_attn.q_proj", "self_attn.k_proj", f"self_attn.{value}")
    return replace(layer, qkv=qkv, key_norm="self_attn.k_norm", value_norm="self_attn.v_norm")


def _gemma4_mixture(config: Any) -> MixtureSpec:
    chosen, scale, factors = config.top_k_experts, "router.scale", "router.per_expert_scale"
    return MixtureSpec("", "router.proj", chosen=chosen, router_scale=scale, factors=factors)


def _layer_inputs(config: Any) -> LayerInputs:
    scales = config.hidden_size_per_layer_input**0.5, config.hidden_size**-0.5, 2**-0.5
    return LayerInputs(config.vocab_size_per_layer_input, *scales)


def vaultgemma(config: Any) -> DecoderSpec:
    layer = LayerSpec(feed_forward_norm="pre_feedforward_layernorm")
    return DecoderSpec.uniform(config, layer, **_facts(config, config.hidden_activation))


# The modules of further inputs (`LayerInputs`): one for all layers, and two of each layer.
_LAYER_INPUTS = ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection")


def _gemma3n_plan(config: Any) -> ShardingPlan:
    """Returns a plan in which every rank has all features of layers that set the smaller ones to zero."""
    sparse = [index for index, share in enumerate(config.activation_sparsity_pattern) if share > 0]
    dense = sorted(set(range(config.num_hidden_layers)) - set(sparse))
    splits = {name: split for name, split in LLAMA.items() if name not in GATED}
    splits |= {"embed_tokens_per_layer": vocab_parallel_embedding()}
    splits |= {f"layers.{index}.mlp.{name}": split for index in dense for name, split in GATED.items()}
    whole = [f"layers.{index}.mlp.{name}" for index in sparse for name in GATED]
    whole += [f"altup_{kind}.{index}" for kind in _ALTUP for index in range(config.altup_num_inputs - 1)]
    whole += ["correction_coefs", "prediction_coefs", "modality_router", "laurel.linear_left", "laurel.linear_right"]
    return ShardingPlan(heads_of(config), ("self_attn",), splits, (*whole, *_LAYER_INPUTS))


_ALTUP = ("projections", "unembed_projections")


def _gemma4_plan(config: Any) -> ShardingPlan:
    """Layers that look at all tokens may have fewer KV heads than those with a window."""
    first, *_ = by_layer = [heads_of(layer) for layer in config.per_layer_config]
    others = {f"layers.{index}.self_attn": heads for index, heads in enumerate(by_layer) if heads != first}
    splits = {**LLAMA, **EXPERTS, "embed_tokens_per_layer": vocab_parallel_embedding()}
    for name, own in others.items():
        splits |= attention(name, heads=own)
    return ShardingPlan(first, ("self_attn",), splits, (*_LAYER_INPUTS, "router.proj"), layer_heads=others)


def _gemma4_two_way(config: Any) -> TwoWay:
    return "windows" if config.get_text_config().use_bidirectional_attention == "vision" else ""


FAMILIES = {
    "gemma": Family(gemma, llama_plan),
    "gemma2": Family(gemma2, llama_plan),
    "gemma3": Family(images=True, two_way=lambda _: "all"),
    "gemma3_text": Family(gemma3, llama_plan),
    "gemma3n": Family(text_alone=True),
    "gemma3n_text": Family(gemma3n, _gemma3n_plan),
    "gemma4": Family(images=True, two_way=_gemma4_two_way),
    "gemma4_text": Family(gemma4, _gemma4_plan),
    "vaultgemma": Family(vaultgemma, llama_plan),
}
