"""Cohere's Command R and A: attention and feed-forward part side by side, layer norms without a bias, scaled logits."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, RopeSpec, activation
from tgi_server.engine.models.splits import llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, Slice, Split
from tgi_server.engine.parallel.shares import key_heads, query_heads


def cohere(config: Any) -> DecoderSpec:
    layer = LayerSpec(feed_forward_norm=None)
    if getattr(config, "use_qk_norm", False):
        layer = replace(layer, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    return DecoderSpec.uniform(
        config,
        layer,
        activation=activation(config.hidden_act),
        ropes=(RopeSpec(table="pairs"),),
        interleaved=True,
        parallel=True,
        logits_divisor=1 / config.logit_scale,
    )


def cohere2(config: Any) -> DecoderSpec:
    """Layers that look at all tokens have no rotary positions."""
    return cohere(config).rotary_in(kind == "sliding_attention" for kind in config.layer_types)


def _plan(config: Any) -> ShardingPlan:
    norms = {"q_norm": Split({"weight": Slice(0, query_heads)}), "k_norm": Split({"weight": Slice(0, key_heads)})}
    return llama_plan(config, norms)


FAMILIES = {"cohere": Family(cohere, _plan), "cohere2": Family(cohere2, llama_plan)}
