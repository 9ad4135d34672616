"""Models that are Llama but for a few facts: RMS norms, rotary positions, gated feed-forward parts.

Beside Llama: Arcee, CWM, ERNIE 4.5, EXAONE 4, Helium, Jais 2, Ministral, Mistral, Nemotron, Qwen 2 and 3 (also -VL),
Seed-OSS, SmolLM3, StableLM.
"""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.families.olmo2 import olmo2
from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, NoSpec, activation
from tgi_server.engine.models.splits import head_counts, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan


def llama(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(config, activation=activation(config.hidden_act))


def arcee(config: Any) -> DecoderSpec:
    """Arcee, Jais 2 and Nemotron, whose feed-forward parts have no gate."""
    layer = LayerSpec(up=("mlp.up_proj",))
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act), gated_mlp=False)


def interleaved(config: Any) -> DecoderSpec:
    return replace(llama(config), interleaved=True)


def exaone4(config: Any) -> DecoderSpec:
    """Returns the spec. If some layers have windows, the others have no rotary positions."""
    rotary = (config.sliding_window is None or kind == "sliding_attention" for kind in config.layer_types)
    return olmo2(config).rotary_in(rotary)


def qwen3(config: Any) -> DecoderSpec:
    layer = LayerSpec(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act))


def smollm3(config: Any) -> DecoderSpec:
    """Some layers have no rotary positions; the configuration has a 0 for those."""
    return llama(config).rotary_in(map(bool, config.no_rope_layers))


def stablelm(config: Any) -> DecoderSpec:
    if config.qk_layernorm:
        raise NoSpec("each head has a layer norm of its own")
    layer = LayerSpec(feed_forward_norm=None) if config.use_parallel_residual else LayerSpec()
    return DecoderSpec.uniform(
        config, layer, activation=activation(config.hidden_act), parallel=config.use_parallel_residual
    )


def _stablelm(config: Any) -> ShardingPlan:
    return llama_plan(config, {"self_attn": head_counts("num_heads", of_keys=("num_key_value_heads",))})


FAMILIES = {
    "arcee": Family(arcee, llama_plan),
    "cwm": Family(llama, llama_plan),
    "ernie4_5": Family(interleaved, llama_plan),
    "exaone4": Family(exaone4, llama_plan),
    "helium": Family(interleaved, llama_plan),
    "jais2": Family(arcee, llama_plan),
    "llama": Family(llama, llama_plan),
    "ministral": Family(llama, llama_plan),
    "mistral": Family(llama, llama_plan),
    "nemotron": Family(arcee, llama_plan),
    "qwen2": Family(llama, llama_plan),
    "qwen2_vl_text": Family(llama, llama_plan),
    "qwen2_5_vl_text": Family(llama, llama_plan),
    "qwen3": Family(qwen3, llama_plan),
    "qwen3_vl_text": Family(qwen3, llama_plan),
    "seed_oss": Family(llama, llama_plan),
    "smollm3": Family(smollm3, llama_plan),
    "stablelm": Family(stablelm, _stablelm),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), Family(images=True)),
}
