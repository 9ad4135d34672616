"""Llama, Mistral, Qwen 2 and 3 (also -VL), Seed-OSS, SmolLM3: RMS norms, rotary positions, gated feed-forward parts."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, activation
from tgi_server.engine.models.splits import llama_plan


def llama(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(config, activation=activation(config.hidden_act))


def qwen3(config: Any) -> DecoderSpec:
    layer = LayerSpec(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act))


def smollm3(config: Any) -> DecoderSpec:
    """Some layers have no rotary positions; the configuration has a 0 for those."""
    layers = (LayerSpec(rope=0 if rotary else None) for rotary in config.no_rope_layers)
    return replace(llama(config), layers=tuple(layers))


FAMILIES = {
    "ernie4_5": Family(plan=llama_plan),
    "exaone4": Family(plan=llama_plan),
    "llama": Family(llama, llama_plan),
    "mistral": Family(llama, llama_plan),
    "qwen2": Family(llama, llama_plan),
    "qwen2_vl_text": Family(llama, llama_plan),
    "qwen2_5_vl_text": Family(llama, llama_plan),
    "qwen3": Family(qwen3, llama_plan),
    "qwen3_vl_text": Family(qwen3, llama_plan),
    "seed_oss": Family(llama, llama_plan),
    "smollm3": Family(smollm3, llama_plan),
    "stablelm": Family(plan=llama_plan),
}
