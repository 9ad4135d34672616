"""Mixtral, OLMoE, Qwen MoE, Mellum, MiMo V2 and MiniMax M2: Llama's attention, and mixtures of experts."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, MixtureSpec, NoSpec, activation
from tgi_server.engine.models.splits import EXPERTS, NORMS_OF_ALL_HEADS, attention, heads_of, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, Slice, Split
from tgi_server.engine.parallel.shares import Heads, query_heads

_QWEN3 = LayerSpec(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")


def mixtral(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(config, LayerSpec(mixture=MixtureSpec()), activation=activation(config.hidden_act))


def qwen3_moe(config: Any) -> DecoderSpec:
    return _qwen(config, _QWEN3, replace(_QWEN3, mixture=MixtureSpec(normalised=config.norm_topk_prob)))


def qwen3_vl_moe(config: Any) -> DecoderSpec:
    """The shares of a token's experts add up to one, whatever `norm_topk_prob` says."""
    return _qwen(config, _QWEN3, replace(_QWEN3, mixture=MixtureSpec()))


def qwen2_moe(config: Any) -> DecoderSpec:
    mixture = MixtureSpec(normalised=config.norm_topk_prob)
    return _qwen(config, LayerSpec(), with_shared_expert(LayerSpec(), mixture))


def _qwen(config: Any, plain: LayerSpec, mixed: LayerSpec) -> DecoderSpec:
    layers = (mixed if sparse else plain for sparse in sparse_layers(config))
    return DecoderSpec(tuple(layers), activation=activation(config.hidden_act))


def sparse_layers(config: Any) -> list[bool]:
    """Returns which layers of Qwen's models have a mixture; the others have a plain feed-forward part."""
    return [
        config.num_experts > 0 and layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
        for layer in range(config.num_hidden_layers)
    ]


def with_shared_expert(layer: LayerSpec, mixture: MixtureSpec) -> LayerSpec:
    """Returns a layer with a mixture and an expert that all tokens share."""
    return replace(
        layer,
        mixture=mixture,
        shared=True,
        shared_gate="mlp.shared_expert_gate",
        up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
        down="mlp.shared_expert.down_proj",
    )


def olmoe(config: Any) -> DecoderSpec:
    if config.clip_qkv is not None:
        raise NoSpec("queries, keys and values are clipped after their norms")
    layer = replace(_QWEN3, mixture=MixtureSpec(normalised=config.norm_topk_prob))
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act))


def minimax(config: Any) -> DecoderSpec:
    layer = replace(_QWEN3, mixture=MixtureSpec(sigmoid=True, bias="e_score_correction_bias"))
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act))


def mellum(config: Any) -> DecoderSpec:
    """Qwen3's layers, some of which have windows and their own rotary tables, and some a plain feed-forward part."""
    mixed = replace(_QWEN3, mixture=MixtureSpec(normalised=config.norm_topk_prob))
    layers = (mixed if kind == "sparse" else _QWEN3 for kind in config.mlp_layer_types)
    spec = DecoderSpec(tuple(layers), activation=activation(config.hidden_act))
    return spec.rotary_by_type(config.layer_types)


def mimo(config: Any) -> DecoderSpec:
    """Some layers have windows and rotary tables of their own, and some a plain feed-forward part."""
    plain = LayerSpec(value_scale=1.0 if config.attention_value_scale is None else config.attention_value_scale)
    mixed = replace(plain, mixture=MixtureSpec.deepseek(config))
    layers = (mixed if kind == "sparse" else plain for kind in config.mlp_layer_types)
    spec = DecoderSpec(tuple(layers), activation=activation(config.hidden_act))
    return spec.rotary_by_type(config.layer_types)


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
    "mellum": Family(mellum, _plan),
    "mimo_v2_flash": Family(mimo, _mimo),
    "minimax_m2": Family(minimax, _minimax),
    "mixtral": Family(mixtral, _plan),
    "olmoe": Family(olmoe, _minimax),
    "qwen2_moe": Family(qwen2_moe, _qwen2_moe),
    "qwen3_moe": Family(qwen3_moe, _plan),
    "qwen3_vl_moe_text": Family(qwen3_vl_moe, _plan),
    "qwen3_vl_moe": Family(images=True),
}
