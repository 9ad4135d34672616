"""DeepSeek-V2, and families with its attention over latents, which `transformers` computes."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import Family
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
    """Kimi Linear has Kimi's delta rule in some layers, with heads of its own."""
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
    # In checkpoints, what the forget gate has belongs to the module around it.
    own = Split({"dt_bias": Slice(0, of_head), "A_log": Slice(2, of_head)}, sizes={"qkv_dim": of_head})
    splits |= dict.fromkeys(linear, own)
    whole = (*plan.whole, "f_a_proj", "g_a_proj")
    return replace(plan, splits={**plan.splits, **splits}, whole=whole, layer_heads=dict.fromkeys(linear, heads))


# Projections, and convolutions as checkpoints have them, with outputs for each head of Kimi's delta rule.
_OF_KIMI_HEADS = (
    *("q_proj", "k_proj", "v_proj", "b_proj", "g_b_proj", "f_b_proj", "forget_gate.f_b_proj"),
    *("q_conv1d", "k_conv1d", "v_conv1d"),
)

_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu")
FAMILIES = {
    **dict.fromkeys(_TYPES, Family(plan=_plan, attention="latents")),
    "kimi_linear": Family(plan=_kimi_plan, attention="latents"),
}
