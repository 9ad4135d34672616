"""Qwen3-Next, Qwen 3.5 and OLMo Hybrid: gated delta nets (Yang et al., 2024) in most layers, attention in the others.

In a gated delta net, several value heads share a key head. A shard has some value heads, with the key heads of these.
"""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.families.mixtral import sparse_layers, with_shared_expert
from tgi_server.engine.models.families.olmo2 import OLMO2
from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, MixerSpec, MixtureSpec, RopeSpec, activation
from tgi_server.engine.models.splits import EXPERTS, NORMS_OF_ALL_HEADS, Splits, llama_plan
from tgi_server.engine.parallel.plan import ShardingPlan, Slice, Split, column_parallel, row_parallel
from tgi_server.engine.parallel.shares import Heads, grouped_values, key_heads, of_heads, query_heads, sections

_LAYER = LayerSpec(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm", gated=True)
_MIXED = with_shared_expert(_LAYER, MixtureSpec())
_QWEN3_5 = MixerSpec("linear_attn", "gated_delta_net", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
_QWEN3_NEXT = replace(_QWEN3_5, projections=("in_proj_qkvz", "in_proj_ba"), grouped=True)


def qwen3_5(config: Any) -> DecoderSpec:
    return _qwen(config, _QWEN3_5, [_LAYER] * config.num_hidden_layers)


def qwen3_5_moe(config: Any) -> DecoderSpec:
    return _qwen(config, _QWEN3_5, [_MIXED] * config.num_hidden_layers)


def qwen3_next(config: Any) -> DecoderSpec:
    """Some layers may have a plain feed-forward part."""
    return _qwen(config, _QWEN3_NEXT, [_MIXED if sparse else _LAYER for sparse in sparse_layers(config)])


def _qwen(config: Any, mixer: MixerSpec, layers: list[LayerSpec]) -> DecoderSpec:
    kinds = zip(layers, config.layer_types, strict=True)
    mixed = (replace(layer, mixer=mixer if kind == "linear_attention" else None) for layer, kind in kinds)
    return DecoderSpec(tuple(mixed), activation=activation(config.hidden_act))


def olmo(config: Any) -> DecoderSpec:
    """Attention layers have norms after their parts; layers with recurrent states have norms before them."""
    rope = getattr(config, "rope_parameters", None) or {}
    rotary = rope.get("rope_theta") is not None
    attending = replace(OLMO2, rope=0 if rotary else None)
    mixer = MixerSpec(
        "linear_attn",
        "gated_delta_net",
        ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
        output="o_proj",
        norm="o_norm",
    )
    layers = (LayerSpec(mixer=mixer) if kind == "linear_attention" else attending for kind in config.layer_types)
    ropes = (RopeSpec(),) if rotary else ()
    return DecoderSpec(tuple(layers), activation=activation(config.hidden_act), ropes=ropes)


def _delta_net(config: Any, output: str) -> Splits:
    """Returns the splits of a gated delta net that all families share. output: the name of its last projection."""
    heads = _heads(config)
    keys, values = of_heads(heads, key_heads), of_heads(heads, query_heads)
    key_size = heads.keys * config.linear_key_head_dim
    value_size = heads.queries * config.linear_value_head_dim
    mixed = sections((key_size, keys), (key_size, keys), (value_size, values))
    sizes = {"num_v_heads": values, "value_dim": values, "num_k_heads": keys, "key_dim": keys, "conv_dim": mixed}
    return {
        "linear_attn": Split({"A_log": Slice(0, values), "dt_bias": Slice(0, values)}, sizes=sizes),
        "linear_attn.conv1d": column_parallel(mixed),
        "linear_attn.in_proj_qkv": column_parallel(mixed),
        **{f"linear_attn.{name}": column_parallel(keys) for name in ("q_proj", "k_proj")},
        **{f"linear_attn.{name}": column_parallel(sections((key_size, keys))) for name in ("q_conv1d", "k_conv1d")},
        "linear_attn.v_conv1d": column_parallel(sections((value_size, values))),
        **{f"linear_attn.{name}": column_parallel(values) for name in _OF_VALUES},
        f"linear_attn.{output}": row_parallel(values),
    }


# Projections with outputs for each value head.
_OF_VALUES = ("in_proj_z", "in_proj_b", "in_proj_a", "v_proj", "a_proj", "b_proj", "g_proj")


def _heads(config: Any) -> Heads:
    return Heads(config.linear_num_value_heads, config.linear_num_key_heads, ("value heads", "key heads"))


def _qwen_plan(config: Any) -> ShardingPlan:
    """In Qwen3-Next a projection computes queries, keys, values and gates, ordered by key head."""
    heads = _heads(config)
    key_size, value_size = config.linear_key_head_dim, config.linear_value_head_dim
    joined = {
        "linear_attn.in_proj_qkvz": column_parallel(
            of_heads(heads, grouped_values(2 * key_size, value_size, value_size))
        ),
        "linear_attn.in_proj_ba": column_parallel(of_heads(heads, grouped_values(0, 1, 1))),
    }
    splits = {**EXPERTS, **_delta_net(config, "out_proj"), **joined}
    return llama_plan(config, splits, whole=("gate", "shared_expert_gate"))


def _olmo_plan(config: Any) -> ShardingPlan:
    return llama_plan(config, {**NORMS_OF_ALL_HEADS, **_delta_net(config, "o_proj")})


FAMILIES = {
    "qwen3_5_text": Family(qwen3_5, _qwen_plan, mtp=True),
    "qwen3_5_moe_text": Family(qwen3_5_moe, _qwen_plan, mtp=True),
    "qwen3_next": Family(qwen3_next, _qwen_plan, mtp=True),
    "olmo_hybrid": Family(olmo, _olmo_plan),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), Family(images=True)),
}
