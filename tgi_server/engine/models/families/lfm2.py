"""LFM2: convolutions over a few tokens in most layers, attention in the others."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, MixerSpec, MixtureSpec
from tgi_server.engine.models.splits import EXPERTS, attention, feed_forward, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel, row_parallel
from tgi_server.engine.parallel.shares import parts, sections

_LAYER = LayerSpec(
    output="self_attn.out_proj",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    attention_norm="operator_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    feed_forward_norm="ffn_norm",
)


def lfm2(config: Any) -> DecoderSpec:
    convolution = MixerSpec("conv", "short_convolution")
    layers = (replace(_LAYER, mixer=convolution if kind == "conv" else None) for kind in config.layer_types)
    return DecoderSpec(tuple(layers), final_norm="embedding_norm")


def lfm2_moe(config: Any) -> DecoderSpec:
    """The first layers have a plain feed-forward part."""
    bias = "expert_bias" if config.use_expert_bias else None
    mixture = MixtureSpec(
        "feed_forward", sigmoid=True, bias=bias, normalised=config.norm_topk_prob, factor=config.routed_scaling_factor
    )
    spec, dense = lfm2(config), config.num_dense_layers
    mixed = (replace(layer, mixture=mixture) for layer in spec.layers[dense:])
    return replace(spec, layers=(*spec.layers[:dense], *mixed), rotary="pos_emb")


def _plan(config: Any) -> ShardingPlan:
    """Each channel is convolved alone, so that a shard may have any of them."""
    thirds = sections(*3 * [(config.hidden_size, parts)])
    splits = {
        **attention("self_attn", output="out_proj"),
        "conv.in_proj": column_parallel(thirds),
        "conv.conv": column_parallel(),
        "conv.out_proj": row_parallel(),
        **feed_forward("feed_forward.w1", "feed_forward.w3", down="feed_forward.w2"),
        **EXPERTS,
    }
    return llama_plan(config, splits, whole=("gate",))


FAMILIES = {
    "lfm2": Family(lfm2, _plan),
    "lfm2_moe": Family(lfm2_moe, _plan),
    "lfm2_vl": Family(images=True),
}
