"""BLOOM: alibi, embeddings with a norm, query, key and value in one projection, head by head."""

from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, NoSpec
from tgi_server.engine.models.splits import HEAD, feed_forward, head_counts, heads_of
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel, row_parallel, vocab_parallel_embedding
from tgi_server.engine.parallel.shares import query_heads

BLOOM = LayerSpec(
    attention="self_attention",
    qkv=("self_attention.query_key_value",),
    grouped=True,
    output="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
    rope=None,
    alibi="geometric",
)


def bloom(config: Any) -> DecoderSpec:
    if config.apply_residual_connection_post_layernorm:
        raise NoSpec("its layers add to what is normalised")
    return DecoderSpec.uniform(
        config,
        BLOOM,
        activation="gelu_tanh",
        gated_mlp=False,
        layer_list="h",
        final_norm="ln_f",
        embedding_norm="word_embeddings_layernorm",
        ropes=(),
    )


def bloom_plan(config: Any) -> ShardingPlan:
    splits = {
        "word_embeddings": vocab_parallel_embedding(),
        "self_attention": head_counts("num_heads"),
        "self_attention.query_key_value": column_parallel(query_heads),
        "self_attention.dense": row_parallel(query_heads),
        **feed_forward("dense_h_to_4h", down="dense_4h_to_h"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("self_attention",), splits)


FAMILIES = {"bloom": Family(bloom, bloom_plan, relative=True)}
