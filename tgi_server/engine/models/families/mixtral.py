"""Mixtral, OLMoE, Qwen MoE, MiMo V2 and MiniMax M2: Llama's attention, and mixtures of experts."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, MixtureSpec, NoSpec, RopeSpec, activation
from tgi_server.engine.models.splits import EXPERTS, NORMS_OF_ALL_HEADS, attention, heads_of, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, Slice, Split
from tgi_server.engine.parallel.shares import Heads, query_heads


def mixtral(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(config, LayerSpec(mixture=MixtureSpec()), activation=activation(config.hidden_act))


def qwen3_moe(config: Any) -> DecoderSpec:
    """Some layers may have a plain feed-forward part."""
    mixed = [
        config.num_experts > 0 and layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    ]
    plain = LayerSpec(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    mixture = MixtureSpec(normalised=config.norm_topk_prob)
    layers = (replace(plain, mixture=mixture) if each else plain for each in mixed)
    return DecoderSpec(tuple(layers), activation=activation(config.hidden_act))


def qwen3_vl_moe(config: Any) -> DecoderSpec:
    """The shares of a token's experts add up to one, whatever `norm_topk_prob` says."""
    spec = qwen3_moe(config)
    layers = (replace(each, mixture=MixtureSpec()) if each.mixture else each for each in spec.layers)
    return replace(spec, layers=tuple(layers))


def qwen2_moe(config: Any) -> DecoderSpec:
    """Beside its own experts every token has one that all have."""
    spec = qwen3_moe(config)
    plain = LayerSpec()
    mixed = LayerSpec(
        mixture=MixtureSpec(normalised=config.norm_topk_prob),
        shared=True,
        shared_gate="mlp.shared_expert_gate",
        up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        down="mlp.shared_expert.down_proj",
    )
    return replace(spec, layers=tuple(mixed if each.mixture else plain for each in spec.layers))


def olmoe(config: Any) -> DecoderSpec:
    if config.clip_qkv is not None:
        raise NoSpec("queries, keys and values are clipped after their norms")
    mixture = MixtureSpec(normalised=config.norm_topk_prob)
    layer = LayerSpec(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm", mixture=mixture)
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act))


def minimax(config: Any) -> DecoderSpec:
    mixture = MixtureSpec(sigmoid=True, bias="e_score_correction_bias")
    layer = LayerSpec(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm", mixture=mixture)
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act))


def mimo(config: Any) -> DecoderSpec:
    """Some layers have windows and rotary tables of their own, and some a plain feed-forward part."""
    types = sorted(set(config.layer_types))
    layer = LayerSpec(value_scale=1.0 if config.attention_value_scale is None else config.attention_value_scale)
    kinds = zip(config.layer_types, config.mlp_layer_types, strict=True)
    layers = (
        replace(layer, rope=types.index(attends), mixture=MixtureSpec.deepseek(config) if feeds == "sparse" else None)
        for attends, feeds in kinds
    )
    ropes = tuple(RopeSpec(each) for each in types)
    return DecoderSpec(tuple(layers), activation=activation(config.hidden_act), ropes=ropes)


def _plan(config: Any) -> ShardingPlan:
    return llama_plan(config, EXPERTS, whole=("gate",))


def _mimo(config: Any) -> ShardingPlan:
    """Layers with a window have twice as many KV heads, and sinks."""
    whole = heads_of(config)
    windows = Heads(whole.queries, 2 * whole.keys)
    others = {
        f"layers.{index}.self_attn": windows
        for index, kind in enumerate(config.layer_types)
        if kind == "sliding_attention"
    }
    sinks = dict.fromkeys(("sinks", "attention_sink_bias"), Slice(0, query_heads))  # the latter in checkpoints
    splits = {**EXPERTS, "self_attn": Split(sinks)}
    for name in others:
        splits |= attention(name, heads=windows)
    return replace(llama_plan(config, splits, whole=("gate",)), layer_heads=others)


def _minimax(config: Any) -> ShardingPlan:
    return llama_plan(config, {**EXPERTS, **NORMS_OF_ALL_HEADS}, whole=("gate",))


def _qwen2_moe(config: Any) -> ShardingPlan:
    return llama_plan(config, EXPERTS, whole=("gate", "shared_expert_gate"))


FAMILIES = {
    "mimo_v2_flash": Family(mimo, _mimo),
    "minimax_m2": Family(minimax, _minimax),
    "mixtral": Family(mixtral, _plan),
    "olmoe": Family(olmoe, _minimax),
    "qwen2_moe": Family(qwen2_moe, _qwen2_moe),
    "qwen3_moe": Family(qwen3_moe, _plan),
    "qwen3_vl_moe_text": Family(qwen3_vl_moe, _plan),
    "qwen3_vl_moe": Family(images=True),
}
