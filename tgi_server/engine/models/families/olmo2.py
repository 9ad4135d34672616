"""OLMo 2 and 3: norms only after attention and the feed-forward part, and over all query and key heads together."""

from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, activation
from tgi_server.engine.models.splits import NORMS_OF_ALL_HEADS, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan

OLMO2 = LayerSpec(
    attention_norm=None,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    attended_norm="post_attention_layernorm",
    feed_forward_norm=None,
    fed_norm="post_feedforward_layernorm",
)


def olmo2(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(config, OLMO2, activation=activation(config.hidden_act))


def olmo3(config: Any) -> DecoderSpec:
    """Layers that look at all tokens have other rotary tables than those with a window."""
    return olmo2(config).rotary_by_type(config.layer_types)


def _plan(config: Any) -> ShardingPlan:
    return llama_plan(config, NORMS_OF_ALL_HEADS)


FAMILIES = {"olmo2": Family(olmo2, _plan), "olmo3": Family(olmo3, _plan)}
