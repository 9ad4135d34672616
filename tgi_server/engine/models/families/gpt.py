"""GPT-2, GPTBigCode (SantaCoder, StarCoder), GPT-J, GPT-Neo, GPT-NeoX and Phi, which `transformers` computes."""

from typing import Any

from tgi_server.engine.models.spec import Family
from tgi_server.engine.models.splits import HEAD, attention, feed_forward, heads_of
from tgi_server.engine.parallel.plan import (
    ShardingPlan,
    column_parallel,
    row_parallel,
    vocab_parallel_embedding,
    vocab_parallel_head,
)
from tgi_server.engine.parallel.shares import Heads, queries_keys_values, query_heads

_EMBEDDING = {"wte": vocab_parallel_embedding()}


def _gpt2(config: Any) -> ShardingPlan:
    splits = {
        **_EMBEDDING,
        "attn.c_attn": column_parallel(queries_keys_values, transposed=True),
        "attn.c_proj": row_parallel(query_heads, transposed=True),
        "mlp.c_fc": column_parallel(transposed=True),
        "mlp.c_proj": row_parallel(transposed=True),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("attn",), splits, whole=("wpe",))


def _gpt_bigcode(config: Any) -> ShardingPlan:
    queries = config.num_attention_heads
    splits = {
        **_EMBEDDING,
        "attn.c_attn": column_parallel(queries_keys_values if config.multi_query else query_heads),
        "attn.c_proj": row_parallel(query_heads),
        **feed_forward("mlp.c_fc", down="mlp.c_proj"),
        **HEAD,
    }
    return ShardingPlan(Heads(queries, 1 if config.multi_query else queries), ("attn",), splits, whole=("wpe",))


def _gptj(config: Any) -> ShardingPlan:
    splits = {**_EMBEDDING, **attention("attn", "out_proj"), **feed_forward("fc_in", down="fc_out"), **HEAD}
    return ShardingPlan(heads_of(config), ("attn",), splits)


def _gpt_neo(config: Any) -> ShardingPlan:
    splits = {
        **_EMBEDDING,
        **attention("attn.attention", "out_proj"),
        **feed_forward("mlp.c_fc", down="mlp.c_proj"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("attention",), splits, whole=("wpe",))


def _gpt_neox(config: Any) -> ShardingPlan:
    splits = {
        "embed_in": vocab_parallel_embedding(),
        "attention.query_key_value": column_parallel(query_heads),
        "attention.dense": row_parallel(query_heads),
        **feed_forward("dense_h_to_4h", down="dense_4h_to_h"),
        **HEAD,
        "embed_out": vocab_parallel_head(),
    }
    return ShardingPlan(heads_of(config), ("attention",), splits)


def _phi(config: Any) -> ShardingPlan:
    splits = {
        "embed_tokens": vocab_parallel_embedding(),
        **attention("self_attn", "dense"),
        **feed_forward("fc1", down="fc2"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("self_attn",), splits)


FAMILIES = {
    "gpt2": Family(plan=_gpt2),
    "gpt_bigcode": Family(plan=_gpt_bigcode),
    "gpt_neo": Family(plan=_gpt_neo),
    "gpt_neox": Family(plan=_gpt_neox),
    "gptj": Family(plan=_gptj, attention="gptj"),
    "phi": Family(plan=_phi),
}
