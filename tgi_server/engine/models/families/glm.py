"""GLM-4: a part of each head is turned, neighbouring elements together; the newer one has norms behind, too."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, RopeSpec, activation
from tgi_server.engine.models.splits import EXPERTS, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel
from tgi_server.engine.parallel.shares import halves

_LAYER = LayerSpec(up=("mlp.gate_up_proj",))


def glm(config: Any) -> DecoderSpec:
    """`glm` is GLM-4-9B in the form of `transformers`."""
    return DecoderSpec.uniform(config, _LAYER, activation=activation(config.hidden_act), interleaved=True)


def glm4(config: Any) -> DecoderSpec:
    """`glm4` is GLM-4-0414."""
    layer = replace(_LAYER, attended_norm="post_self_attn_layernorm", fed_norm="post_mlp_layernorm")
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act), interleaved=True)


def glm4v(config: Any) -> DecoderSpec:
    """`glm4v_text` reads the texts of GLM-4.1V."""
    return replace(glm4(config), ropes=(RopeSpec(table="pairs"),))


def _plan(config: Any) -> ShardingPlan:
    return llama_plan(config, {"gate_up_proj": column_parallel(halves)})


def _moe_plan(config: Any) -> ShardingPlan:
    """GLM-4.5, whose attention and experts are split as those of Qwen3-MoE."""
    return llama_plan(config, EXPERTS, whole=("gate",))


FAMILIES = {
    "glm": Family(glm, _plan),
    "glm4": Family(glm4, _plan),
    "glm4v_text": Family(glm4v, _plan),
    "glm4_moe": Family(plan=_moe_plan),
}
