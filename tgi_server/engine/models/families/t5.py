"""T5 and BART: encoders and decoders, in padded batches."""

from typing import Any

from tgi_server.engine.models.spec import Family
from tgi_server.engine.models.splits import HEAD, attention, feed_forward, head_counts, heads_of
from tgi_server.engine.parallel.plan import ShardingPlan, Slice, Split, vocab_parallel_embedding
from tgi_server.engine.parallel.shares import query_heads

_EMBEDDINGS = {"shared": vocab_parallel_embedding(), "embed_tokens": vocab_parallel_embedding()}


def _t5(config: Any) -> ShardingPlan:
    splits = {
        **_EMBEDDINGS,
        **dict.fromkeys(("SelfAttention", "EncDecAttention"), head_counts("n_heads")),
        **attention("SelfAttention", "o", "q", "k", "v"),
        **attention("EncDecAttention", "o", "q", "k", "v"),
        "relative_attention_bias": Split({"weight": Slice(1, query_heads)}),
        **feed_forward("wi", "wi_0", "wi_1", down="wo"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("SelfAttention", "EncDecAttention"), splits)


def _bart(config: Any) -> ShardingPlan:
    splits = {
        **_EMBEDDINGS,
        **attention("self_attn", "out_proj"),
        **attention("encoder_attn", "out_proj"),
        **feed_forward("fc1", down="fc2"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("self_attn", "encoder_attn"), splits, whole=("embed_positions",))


FAMILIES = {
    "bart": Family(plan=_bart),
    "mt5": Family(relative=True),
    "t5": Family(plan=_t5, relative=True),
    "umt5": Family(relative=True),
}
