"""BLOOM: alibi, so `transformers`' own modules with attention of ours."""

from typing import Any

from tgi_server.engine.models.spec import Family
from tgi_server.engine.models.splits import HEAD, feed_forward, heads_of
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel, row_parallel, vocab_parallel_embedding
from tgi_server.engine.parallel.shares import query_heads


def bloom_plan(config: Any) -> ShardingPlan:
    splits = {
        "word_embeddings": vocab_parallel_embedding(),
        "self_attention.query_key_value": column_parallel(query_heads),
        "self_attention.dense": row_parallel(query_heads),
        **feed_forward("dense_h_to_4h", down="dense_4h_to_h"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("self_attention",), splits, own_attention=False)


FAMILIES = {"bloom": Family(plan=bloom_plan, relative=True, attention="bloom")}
