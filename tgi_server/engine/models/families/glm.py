"""GLM-4: rotates a part of each head, neighbouring elements together. The newer one also has norms after its parts."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, MixtureSpec, RopeSpec, activation
from tgi_server.engine.models.splits import EXPERTS, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel
from tgi_server.engine.parallel.shares import halves

_LAYER = LayerSpec(up=("mlp.gate_up_proj",))


def glm(config: Any) -> DecoderSpec:
    """Returns the spec of GLM-4-9B in the form of `transformers` (`glm`)."""
    return DecoderSpec.uniform(config, _LAYER, activation=activation(config.hidden_act), interleaved=True)


def glm4(config: Any) -> DecoderSpec:
    """Returns the spec of GLM-4-0414 (`glm4`)."""
    layer = replace(_LAYER, attended_norm="post_self_attn_layernorm", fed_norm="post_mlp_layernorm")
    return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act), interleaved=True)


def glm4v(config: Any) -> DecoderSpec:
    """Returns the spec of the text model of GLM-4.1V (`glm4v_text`)."""
    return replace(glm4(config), ropes=(RopeSpec(table="pairs"),))


def glm4_moe(config: Any) -> DecoderSpec:
    """GLM-4.5: Llama's attention; in all layers but the first ones a mixture, beside which there is a shared expert."""
    plain = LayerSpec()
    if config.use_qk_norm:
        plain = LayerSpec(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    layers = (plain if index < config.first_k_dense_replace else with_experts(plain, config)
              for index in range(config.num_hidden_layers))  # fmt: skip
    return DecoderSpec(tuple(layers), activation=activation(config.hidden_act))


def with_experts(layer: LayerSpec, config: Any) -> LayerSpec:
    """Returns a layer with a mixture, beside which there is a shared expert, in place of the feed-forward part."""
    up = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    return replace(layer, mixture=MixtureSpec.deepseek(config), shared=True, up=up, down="mlp.shared_experts.down_proj")


def _plan(config: Any) -> ShardingPlan:
    return llama_plan(config, {"gate_up_proj": column_parallel(halves)})


def _moe_plan(config: Any) -> ShardingPlan:
    """Returns the plan of GLM-4.5, whose attention and experts are split like those of Qwen3-MoE."""
    return llama_plan(config, EXPERTS, whole=("gate",))


FAMILIES = {
    "glm": Family(glm, _plan),
    "glm4": Family(glm4, _plan),
    "glm4v_text": Family(glm4v, _plan),
    "glm4_moe": Family(glm4_moe, _moe_plan, mtp=True),
    **dict.fromkeys(("glm4v", "glm4v_moe"), Family(images=True)),
}
