"""Gemma 1, 2 and 3, and VaultGemma: scaled embeddings, GELU for the gate.

Gemma 3n and 4, whose last layers share the keys of earlier ones, and which have further inputs of each layer, are
computed by `transformers`.
"""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, RopeSpec, activation
from tgi_server.engine.models.splits import EXPERTS, GATED, LLAMA, attention, heads_of, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, vocab_parallel_embedding

# From Gemma 2 on there are norms behind attention and the feed-forward part as well.
_LAYER = LayerSpec(
    attended_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    fed_norm="post_feedforward_layernorm",
)


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
    types = sorted(set(config.layer_types))
    layer = replace(_LAYER, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    layers = (replace(layer, rope=types.index(each)) for each in config.layer_types)
    ropes = tuple(RopeSpec(layer_type) for layer_type in types)
    return DecoderSpec(tuple(layers), ropes=ropes, **_facts(config, config.hidden_activation))


def vaultgemma(config: Any) -> DecoderSpec:
    layer = LayerSpec(feed_forward_norm="pre_feedforward_layernorm")
    return DecoderSpec.uniform(config, layer, **_facts(config, config.hidden_activation))


# What Gemma 3n and 4 compute of a token for all layers, and what each layer makes of it.
_LAYER_INPUTS = ("per_layer_model_projection", "per_layer_input_gate", "per_layer_projection")


def _gemma3n_plan(config: Any) -> ShardingPlan:
    """Where a layer sets the smaller features between gate and down projection to zero, every rank has them all."""
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


FAMILIES = {
    "gemma": Family(gemma, llama_plan),
    "gemma2": Family(gemma2, llama_plan),
    "gemma3_text": Family(gemma3, llama_plan),
    "gemma3n_text": Family(plan=_gemma3n_plan),
    "gemma4_text": Family(plan=_gemma4_plan),
    "vaultgemma": Family(vaultgemma, llama_plan),
}
