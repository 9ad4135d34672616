"""Falcon: one KV head for all, for each group of heads, or as many as heads; some with alibi."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.families.bloom import BLOOM, bloom_plan
from tgi_server.engine.models.spec import DecoderSpec, Family, NoSpec, RopeSpec, activation
from tgi_server.engine.models.splits import head_counts
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel
from tgi_server.engine.parallel.shares import Heads, grouped_queries_keys_values, queries_keys_values, query_heads


def falcon(config: Any) -> DecoderSpec:
    """Most have one norm for attention and the feed-forward part, the larger ones one for each."""
    grouped = config.new_decoder_architecture
    layer = replace(BLOOM, grouped=grouped or not config.multi_query, rope=None if config.alibi else 0)
    layer = replace(layer, alibi="rounded" if config.alibi else None)
    if grouped and config.num_ln_in_parallel_attn != 1:
        layer = replace(layer, attention_norm="ln_attn", feed_forward_norm="ln_mlp")
    elif config.parallel_attn:
        layer = replace(layer, feed_forward_norm=None)
    if grouped and not config.parallel_attn:
        raise NoSpec("its feed-forward part has the input of attention, whose output has a norm")
    return DecoderSpec.uniform(
        config,
        layer,
        activation=activation(config.activation),
        gated_mlp=False,
        layer_list="h",
        final_norm="ln_f",
        ropes=() if config.alibi else (RopeSpec(),),
        parallel=config.parallel_attn,
    )


def _plan(config: Any) -> ShardingPlan:
    queries = config.num_attention_heads
    plan = bloom_plan(config)
    if config.new_decoder_architecture:
        heads, layout = Heads(queries, config.num_kv_heads), grouped_queries_keys_values
    elif config.multi_query:
        heads, layout = Heads(queries, 1), queries_keys_values
    else:
        heads, layout = Heads(queries, queries), query_heads
    counts = head_counts("num_heads", of_keys=("num_kv_heads",))
    splits = {**plan.splits, "self_attention": counts, "self_attention.query_key_value": column_parallel(layout)}
    return replace(plan, heads=heads, splits=splits)


FAMILIES = {"falcon": Family(falcon, _plan)}
