"""The splits that many families share: which modules are column- or row-parallel."""

from collections.abc import Mapping
from typing import Any

from tgi_server.engine.parallel.layers import RowParallel, ShardedKeyNorm, ShardedQueryNorm
from tgi_server.engine.parallel.plan import (
    ShardingPlan,
    Slice,
    Split,
    column_parallel,
    row_parallel,
    vocab_parallel_embedding,
    vocab_parallel_head,
)
from tgi_server.engine.parallel.shares import Heads, halves, key_heads, of_heads, query_heads

Splits = Mapping[str, Split]

HEAD: Splits = {"lm_head": vocab_parallel_head()}


def heads_of(config: Any) -> Heads:
    queries = config.num_attention_heads
    return Heads(queries, getattr(config, "num_key_value_heads", None) or queries)


def attention(
    name: str,
    output: str = "o_proj",
    q: str = "q_proj",
    k: str = "k_proj",
    v: str = "v_proj",
    heads: Heads | None = None,
) -> Splits:
    """heads: the module's heads, if other modules of the model have other numbers of heads."""
    queries, keys = (layout if heads is None else of_heads(heads, layout) for layout in (query_heads, key_heads))
    return {
        f"{name}.{q}": column_parallel(queries),
        f"{name}.{k}": column_parallel(keys),
        f"{name}.{v}": column_parallel(keys),
        f"{name}.{output}": row_parallel(queries),
    }


def head_counts(*of_queries: str, of_keys: tuple[str, ...] = ()) -> Split:
    """Returns the split of an attention module, by its attributes that count heads or the features of heads."""
    return Split({}, sizes={**dict.fromkeys(of_queries, query_heads), **dict.fromkeys(of_keys, key_heads)})


def feed_forward(*up: str, down: str) -> Splits:
    return {name: column_parallel() for name in up} | {down: row_parallel()}


GATED = feed_forward("gate_proj", "up_proj", down="down_proj")
LLAMA: Splits = {"embed_tokens": vocab_parallel_embedding(), **attention("self_attn"), **GATED, **HEAD}
EXPERTS: Splits = {
    "experts": Split({"gate_up_proj": Slice(1, halves), "down_proj": Slice(2)}, RowParallel),
    "experts.*.w1": column_parallel(),
    "experts.*.w3": column_parallel(),
    "experts.*.w2": row_parallel(),
}
# Norms of all query heads together, and of all keys.
NORMS_OF_ALL_HEADS: Splits = {
    "q_norm": Split({"weight": Slice(0, query_heads)}, ShardedQueryNorm),
    "k_norm": Split({"weight": Slice(0, key_heads)}, ShardedKeyNorm),
}


def llama_plan(config: Any, splits: Splits = {}, whole: tuple[str, ...] = ()) -> ShardingPlan:  # noqa: B006
    """Returns the plan for Llama's modules. splits: those of other modules. whole: modules that are not split."""
    return ShardingPlan(heads_of(config), ("self_attn",), {**LLAMA, **splits}, whole)
