"""DeepSeek-V2, and families with its attention over latents; DeepSeek-V3.2 and GLM-5 choose the tokens attended to."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tgi_server.engine.models.families.glm import with_experts
from tgi_server.engine.models.spec import (
    DecoderSpec,
    Family,
    IndexSpec,
    LayerSpec,
    MixerSpec,
    MixtureSpec,
    RopeSpec,
    activation,
)
from tgi_server.engine.models.splits import EXPERTS, GATED, HEAD, Splits
from tgi_server.engine.parallel.plan import (
    ShardingPlan,
    Slice,
    Split,
    column_parallel,
    row_parallel,
    vocab_parallel_embedding,
)
from tgi_server.engine.parallel.shares import Heads, of_heads, query_heads, sections

_DELTA = LayerSpec(
    mixer=MixerSpec(
        "self_attn",
        "kimi_delta_attention",
        ("q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj", "g_a_proj", "b_proj"),
        output="o_proj",
        norm="o_norm",
    ),
    rope=None,
)


def dense(config: Any) -> DecoderSpec:
    """Returns the spec of a model without experts."""
    return DecoderSpec.uniform(
        config, _layer(config), activation=activation(config.hidden_act), interleaved=config.rope_interleave
    )


def deepseek_v2(config: Any) -> DecoderSpec:
    """Returns the spec. The weights of a token's experts are not normalised; a group is judged by its best expert."""
    grouped = config.topk_method == "group_limited_greedy"
    groups = {"groups": config.n_group, "chosen_groups": config.topk_group} if grouped else {}
    mixture = MixtureSpec(wide=True, normalised=False, factor=config.routed_scaling_factor, **groups)
    spec = _with_experts(config, lambda layer: replace(with_experts(layer, config), mixture=mixture))
    return replace(spec, ropes=(RopeSpec(table="complex"),), interleaved=True)


def deepseek_v3(config: Any) -> DecoderSpec:
    spec = _with_experts(config, lambda layer: with_experts(layer, config))
    return replace(spec, interleaved=config.rope_interleave)


def deepseek_v32(config: Any) -> DecoderSpec:
    return _with_index(config, ["full"] * config.num_hidden_layers, interleaved=False)


def glm_moe_dsa(config: Any) -> DecoderSpec:
    """Returns the spec of GLM-5, some of whose layers attend to the tokens that an earlier layer has chosen."""
    return _with_index(config, config.indexer_types, interleaved=True)


def kimi(config: Any) -> DecoderSpec:
    """Most layers have Kimi's delta attention; the others attend to latents. There are no rotary positions."""
    attending = replace(_layer(config), rope=None)
    kinds = zip(config.layer_types, config.mlp_layer_types, strict=True)
    layers = (
        with_experts(layer, config) if feeds == "sparse" else layer
        for layer, feeds in ((attending if mixes == "full_attention" else _DELTA, feeds) for mixes, feeds in kinds)
    )
    return DecoderSpec(tuple(layers), activation=activation(config.hidden_act), ropes=())


def minicpm3(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(
        config,
        _layer(config),
        activation=activation(config.hidden_act),
        embedding_scale=config.scale_emb,
        residual_scale=config.scale_depth / config.num_hidden_layers**0.5,
        logits_divisor=config.logits_scaling,
    )


def _layer(config: Any) -> LayerSpec:
    """Returns a layer. Large models compute queries from latents, too."""
    layer = LayerSpec(
        latents=True,
        qkv=("self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"),
        key_norm="self_attn.kv_a_layernorm",
    )
    if config.q_lora_rank is None:
        return layer
    qkv = ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa")
    return replace(layer, qkv=qkv, query="self_attn.q_b_proj", query_norm="self_attn.q_a_layernorm")


def _with_experts(config: Any, mixed: Callable[[LayerSpec], LayerSpec]) -> DecoderSpec:
    """Returns the spec of a model whose first layers have a plain feed-forward part. mixed: gives a layer a mixture."""
    plain, first = _layer(config), config.first_k_dense_replace
    layers = (plain if index < first else mixed(plain) for index in range(config.num_hidden_layers))
    return DecoderSpec(tuple(layers), activation=activation(config.hidden_act))


def _with_index(config: Any, types: Sequence[str], *, interleaved: bool) -> DecoderSpec:
    """Returns the spec of a model whose layers have an index, or share one. types: "full" or "shared", by layer."""
    plain, own = _layer(config), IndexSpec(config.index_topk, config.index_n_heads, interleaved)
    kinds = {"full": replace(plain, index=own), "shared": replace(plain, index=replace(own, shared=True))}
    layers = zip((kinds[name] for name in types), config.mlp_layer_types, strict=True)
    mixed = (with_experts(layer, config) if feeds == "sparse" else layer for layer, feeds in layers)
    return DecoderSpec(tuple(mixed), activation=activation(config.hidden_act), interleaved=True)


def _plan(config: Any) -> ShardingPlan:
    queries = config.num_attention_heads
    splits = {
        "embed_tokens": vocab_parallel_embedding(),
        **{f"self_attn.{name}": column_parallel(query_heads) for name in ("q_proj", "q_b_proj", "kv_b_proj")},
        "self_attn.o_proj": row_parallel(query_heads),
        **GATED,
        **EXPERTS,
        **HEAD,
    }
    whole = ("q_a_proj", "kv_a_proj_with_mqa", "gate", "indexer.wq_b", "indexer.wk", "indexer.weights_proj")
    return ShardingPlan(Heads(queries, queries), ("self_attn",), splits, whole)


def _kimi_plan(config: Any) -> ShardingPlan:
    """Returns the plan of Kimi Linear, whose layers with Kimi's delta rule have other heads than attention."""
    plan, count = _plan(config), config.linear_num_heads
    heads = Heads(count, count, ("heads of linear attention", "key heads"))
    of_head, channels = of_heads(heads, query_heads), count * config.linear_head_dim
    layer: Splits = {
        **{name: column_parallel(of_head) for name in _OF_KIMI_HEADS},
        "conv1d": column_parallel(sections(*3 * [(channels, of_head)])),
        "forget_gate": Split({"dt_bias": Slice(0, of_head), "A_log": Slice(2, of_head)}),
        "o_proj": row_parallel(of_head),
    }
    linear = [f"layers.{index}.self_attn" for index, kind in enumerate(config.layer_types) if kind != "full_attention"]
    splits = {f"{path}.{name}": split for path in linear for name, split in layer.items()}
    # In checkpoints the tensors of the forget gate are named as those of the module around it.
    own = Split({"dt_bias": Slice(0, of_head), "A_log": Slice(2, of_head)}, sizes={"qkv_dim": of_head})
    splits |= dict.fromkeys(linear, own)
    whole = (*plan.whole, "f_a_proj", "g_a_proj")
    return replace(plan, splits={**plan.splits, **splits}, whole=whole, layer_heads=dict.fromkeys(linear, heads))


# Projections, and convolutions as checkpoints have them, with outputs for each head of Kimi's delta rule.
_OF_KIMI_HEADS = (
    *("q_proj", "k_proj", "v_proj", "b_proj", "g_b_proj", "f_b_proj", "forget_gate.f_b_proj"),
    *("q_conv1d", "k_conv1d", "v_conv1d"),
)

FAMILIES = {
    "deepseek_v2": Family(deepseek_v2, _plan),
    "deepseek_v3": Family(deepseek_v3, _plan, mtp=True),
    "deepseek_v32": Family(deepseek_v32, _plan, mtp=True),
    "glm4_moe_lite": Family(deepseek_v3, _plan, mtp=True),
    "glm_moe_dsa": Family(glm_moe_dsa, _plan, mtp=True),
    "minicpm3": Family(minicpm3, _plan),
    "youtu": Family(dense, _plan),
    "kimi_linear": Family(kimi, _kimi_plan),
}
