"""Falcon: one KV head for all, for each group of heads, or as many as heads; some with alibi."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.families.bloom import bloom_plan
from tgi_server.engine.models.spec import Family
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel
from tgi_server.engine.parallel.shares import Heads, grouped_queries_keys_values, queries_keys_values, query_heads


def _plan(config: Any) -> ShardingPlan:
    queries = config.num_attention_heads
    plan = bloom_plan(config)
    if config.new_decoder_architecture:
        heads, layout = Heads(queries, config.num_kv_heads), grouped_queries_keys_values
    elif config.multi_query:
        heads, layout = Heads(queries, 1), queries_keys_values
    else:
        heads, layout = Heads(queries, queries), query_heads
    splits = {**plan.splits, "self_attention.query_key_value": column_parallel(layout)}
    return replace(plan, heads=heads, splits=splits, own_attention=not config.alibi)


FAMILIES = {"falcon": Family(plan=_plan, attention="falcon")}
