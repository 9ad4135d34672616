"""Gemma 1, 2 and 3: norms whose weights say how far from 1 they are, scaled embeddings, GELU for the gate."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, RopeSpec, activation
from tgi_server.engine.models.splits import llama_plan

# From Gemma 2 on there are norms behind attention and the feed-forward part as well.
_LAYER = LayerSpec(
    attended_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    fed_norm="post_feedforward_layernorm",
)


def _facts(config: Any, activation_name: str) -> dict[str, Any]:
    return {
        "activation": activation(activation_name),
        "norms": "rms_plus_one",
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


FAMILIES = {
    "gemma": Family(gemma, llama_plan),
    "gemma2": Family(gemma2, llama_plan),
    "gemma3_text": Family(gemma3, llama_plan),
}
