"""MPT: alibi, so `transformers`' own modules with attention of ours."""

from typing import Any

from tgi_server.engine.models.spec import Family
from tgi_server.engine.models.splits import HEAD, feed_forward, heads_of
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel, row_parallel, vocab_parallel_embedding
from tgi_server.engine.parallel.shares import queries_keys_values, query_heads


def _plan(config: Any) -> ShardingPlan:
    splits = {
        "wte": vocab_parallel_embedding(),
        "attn.Wqkv": column_parallel(queries_keys_values),
        "attn.out_proj": row_parallel(query_heads),
        **feed_forward("ffn.up_proj", down="ffn.down_proj"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("attn",), splits, own_attention=False)


FAMILIES = {"mpt": Family(plan=_plan, relative=True, attention="mpt")}
