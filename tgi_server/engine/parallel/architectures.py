"""The sharding plans: which modules of each architecture are column-parallel, row-parallel, or whole."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from transformers import PretrainedConfig

from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.parallel.layers import RowParallel, ShardedKeyNorm, ShardedQueryNorm
from tgi_server.engine.parallel.plan import (
    FIRST_ONLY,
    ShardingPlan,
    Slice,
    Split,
    column_parallel,
    row_parallel,
    vocab_parallel_embedding,
    vocab_parallel_head,
)
from tgi_server.engine.parallel.shares import (
    Heads,
    grouped_queries_keys_values,
    halves,
    key_heads,
    pairs,
    parts,
    queries_keys_values,
    query_heads,
)

Splits = Mapping[str, Split]

_HEAD: Splits = {"lm_head": vocab_parallel_head()}


def plan_for(config: PretrainedConfig) -> ShardingPlan:
    """Returns how models of that configuration are split. Raises UnsupportedModel for an unknown architecture."""
    plan = _PLANS.get(config.model_type)
    if plan is None:
        raise UnsupportedModel(
            f"{config.model_type} models cannot be split over several shards; leave out --num-shard and --sharded. "
            f"Those that can: {', '.join(sorted(_PLANS))}"
        )
    return plan(config)


def _heads(config: PretrainedConfig) -> Heads:
    queries = config.num_attention_heads
    return Heads(queries, getattr(config, "num_key_value_heads", None) or queries)


def _attention(name: str, output: str = "o_proj", q: str = "q_proj", k: str = "k_proj", v: str = "v_proj") -> Splits:
    return {
        f"{name}.{q}": column_parallel(query_heads),
        f"{name}.{k}": column_parallel(key_heads),
        f"{name}.{v}": column_parallel(key_heads),
        f"{name}.{output}": row_parallel(query_heads),
    }


def _feed_forward(*widening: str, narrowing: str) -> Splits:
    return {name: column_parallel() for name in widening} | {narrowing: row_parallel()}


_GATED = _feed_forward("gate_proj", "up_proj", narrowing="down_proj")
_LLAMA: Splits = {"embed_tokens": vocab_parallel_embedding(), **_attention("self_attn"), **_GATED, **_HEAD}
_EXPERTS: Splits = {
    "experts": Split({"gate_up_proj": Slice(1, halves), "down_proj": Slice(2)}, RowParallel),
    "experts.*.w1": column_parallel(),
    "experts.*.w3": column_parallel(),
    "experts.*.w2": row_parallel(),
}


def _llama(config: PretrainedConfig) -> ShardingPlan:
    return ShardingPlan(_heads(config), ("self_attn",), _LLAMA)


def _mixture(config: PretrainedConfig) -> ShardingPlan:
    return ShardingPlan(_heads(config), ("self_attn",), {**_LLAMA, **_EXPERTS}, whole=("gate",))


def _cohere(config: PretrainedConfig) -> ShardingPlan:
    norms = {"q_norm": Split({"weight": Slice(0, query_heads)}), "k_norm": Split({"weight": Slice(0, key_heads)})}
    return ShardingPlan(_heads(config), ("self_attn",), {**_LLAMA, **norms})


def _olmo2(config: PretrainedConfig) -> ShardingPlan:
    norms = {
        "q_norm": Split({"weight": Slice(0, query_heads)}, ShardedQueryNorm),
        "k_norm": Split({"weight": Slice(0, key_heads)}, ShardedKeyNorm),
    }
    return ShardingPlan(_heads(config), ("self_attn",), {**_LLAMA, **norms})


def _phi3(config: PretrainedConfig) -> ShardingPlan:
    fused = {"self_attn.qkv_proj": column_parallel(queries_keys_values), "gate_up_proj": column_parallel(halves)}
    return ShardingPlan(_heads(config), ("self_attn",), {**_LLAMA, **fused})


def _starcoder2(config: PretrainedConfig) -> ShardingPlan:
    return ShardingPlan(_heads(config), ("self_attn",), {**_LLAMA, **_feed_forward("c_fc", narrowing="c_proj")})


def _gpt_neox(config: PretrainedConfig) -> ShardingPlan:
    splits = {
        "embed_in": vocab_parallel_embedding(),
        "attention.query_key_value": column_parallel(query_heads),
        "attention.dense": row_parallel(query_heads),
        **_feed_forward("dense_h_to_4h", narrowing="dense_4h_to_h"),
        **_HEAD,
        "embed_out": vocab_parallel_head(),
    }
    return ShardingPlan(_heads(config), ("attention",), splits)


def _bloom(config: PretrainedConfig) -> ShardingPlan:
    splits = {
        "word_embeddings": vocab_parallel_embedding(),
        "self_attention.query_key_value": column_parallel(query_heads),
        "self_attention.dense": row_parallel(query_heads),
        **_feed_forward("dense_h_to_4h", narrowing="dense_4h_to_h"),
        **_HEAD,
    }
    return ShardingPlan(_heads(config), ("self_attention",), splits, own_attention=False)


def _falcon(config: Any) -> ShardingPlan:
    queries = config.num_attention_heads
    plan = _bloom(config)
    if config.new_decoder_architecture:
        heads, layout = Heads(queries, config.num_kv_heads), grouped_queries_keys_values
    elif config.multi_query:
        heads, layout = Heads(queries, 1), queries_keys_values
    else:
        heads, layout = Heads(queries, queries), query_heads
    splits = {**plan.splits, "self_attention.query_key_value": column_parallel(layout)}
    return replace(plan, heads=heads, splits=splits, own_attention=not config.alibi)


def _gpt2(config: PretrainedConfig) -> ShardingPlan:
    splits = {
        "wte": vocab_parallel_embedding(),
        "attn.c_attn": column_parallel(queries_keys_values, transposed=True),
        "attn.c_proj": row_parallel(query_heads, transposed=True),
        "mlp.c_fc": column_parallel(transposed=True),
        "mlp.c_proj": row_parallel(transposed=True),
        **_HEAD,
    }
    return ShardingPlan(_heads(config), ("attn",), splits, whole=("wpe",))


def _gpt_bigcode(config: Any) -> ShardingPlan:
    queries = config.num_attention_heads
    splits = {
        "wte": vocab_parallel_embedding(),
        "attn.c_attn": column_parallel(queries_keys_values if config.multi_query else query_heads),
        "attn.c_proj": row_parallel(query_heads),
        **_feed_forward("mlp.c_fc", narrowing="mlp.c_proj"),
        **_HEAD,
    }
    return ShardingPlan(Heads(queries, 1 if config.multi_query else queries), ("attn",), splits, whole=("wpe",))


def _gptj(config: PretrainedConfig) -> ShardingPlan:
    splits = {
        "wte": vocab_parallel_embedding(),
        **_attention("attn", "out_proj"),
        **_feed_forward("fc_in", narrowing="fc_out"),
        **_HEAD,
    }
    return ShardingPlan(_heads(config), ("attn",), splits)


def _gpt_neo(config: PretrainedConfig) -> ShardingPlan:
    splits = {
        "wte": vocab_parallel_embedding(),
        **_attention("attn.attention", "out_proj"),
        **_feed_forward("mlp.c_fc", narrowing="mlp.c_proj"),
        **_HEAD,
    }
    return ShardingPlan(_heads(config), ("attention",), splits, whole=("wpe",))


def _mpt(config: PretrainedConfig) -> ShardingPlan:
    splits = {
        "wte": vocab_parallel_embedding(),
        "attn.Wqkv": column_parallel(queries_keys_values),
        "attn.out_proj": row_parallel(query_heads),
        **_feed_forward("ffn.up_proj", narrowing="ffn.down_proj"),
        **_HEAD,
    }
    return ShardingPlan(_heads(config), ("attn",), splits, own_attention=False)


def _opt(config: PretrainedConfig) -> ShardingPlan:
    splits = {
        "embed_tokens": vocab_parallel_embedding(),
        **_attention("self_attn", "out_proj"),
        **_feed_forward("fc1", narrowing="fc2"),
        **_HEAD,
    }
    return ShardingPlan(_heads(config), ("self_attn",), splits, whole=("embed_positions", "project_in", "project_out"))


def _bart(config: PretrainedConfig) -> ShardingPlan:
    splits = {
        "shared": vocab_parallel_embedding(),
        "embed_tokens": vocab_parallel_embedding(),
        **_attention("self_attn", "out_proj"),
        **_attention("encoder_attn", "out_proj"),
        **_feed_forward("fc1", narrowing="fc2"),
        **_HEAD,
    }
    return ShardingPlan(_heads(config), ("self_attn", "encoder_attn"), splits, whole=("embed_positions",))


def _t5(config: PretrainedConfig) -> ShardingPlan:
    splits = {
        "shared": vocab_parallel_embedding(),
        "embed_tokens": vocab_parallel_embedding(),
        **_attention("SelfAttention", "o", "q", "k", "v"),
        **_attention("EncDecAttention", "o", "q", "k", "v"),
        "relative_attention_bias": Split({"weight": Slice(1, query_heads)}),
        **_feed_forward("wi", "wi_0", "wi_1", narrowing="wo"),
        **_HEAD,
    }
    return ShardingPlan(_heads(config), ("SelfAttention", "EncDecAttention"), splits)


def _deepseek_v3(config: PretrainedConfig) -> ShardingPlan:
    queries = config.num_attention_heads
    splits = {
        "embed_tokens": vocab_parallel_embedding(),
        **{f"self_attn.{name}": column_parallel(query_heads) for name in ("q_proj", "q_b_proj", "kv_b_proj")},
        "self_attn.o_proj": row_parallel(query_heads),
        **_GATED,
        **_EXPERTS,
        **_HEAD,
    }
    return ShardingPlan(
        Heads(queries, queries), ("self_attn",), splits, whole=("q_a_proj", "kv_a_proj_with_mqa", "gate")
    )


def _gpt_oss(config: PretrainedConfig) -> ShardingPlan:
    experts = {
        "gate_up_proj": Slice(2, pairs),
        "gate_up_proj_bias": Slice(1, pairs),
        "down_proj": Slice(1, parts),
        "down_proj_bias": FIRST_ONLY,
    }
    splits = {**_LLAMA, "experts": Split(experts, RowParallel), "self_attn": Split({"sinks": Slice(0, query_heads)})}
    return ShardingPlan(_heads(config), ("self_attn",), splits, whole=("router",))


_PLANS: dict[str, Callable[[PretrainedConfig], ShardingPlan]] = {
    "bart": _bart,
    "bloom": _bloom,
    "cohere": _cohere,
    "deepseek_v3": _deepseek_v3,
    "falcon": _falcon,
    "gemma": _llama,
    "gemma2": _llama,
    "gemma3_text": _llama,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neo": _gpt_neo,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixture,
    "mpt": _mpt,
    "olmo2": _olmo2,
    "opt": _opt,
    "phi3": _phi3,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_moe": _mixture,
    "smollm3": _llama,
    "starcoder2": _starcoder2,
    "t5": _t5,
}
