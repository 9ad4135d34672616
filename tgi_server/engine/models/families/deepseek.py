"""DeepSeek-V2, and families with its attention over latents, which `transformers` computes."""

from typing import Any

from tgi_server.engine.models.spec import Family
from tgi_server.engine.models.splits import EXPERTS, GATED, HEAD
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel, row_parallel, vocab_parallel_embedding
from tgi_server.engine.parallel.shares import Heads, query_heads


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


_TYPES = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu")
_FAMILY = Family(plan=_plan, attention="latents")
# Kimi Linear has it in some layers, and is not split.
FAMILIES = {**dict.fromkeys(_TYPES, _FAMILY), "kimi_linear": Family(attention="latents")}
