"""MPT: alibi, layer norms without a bias; in some models queries, keys and values are clipped."""

from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec
from tgi_server.engine.models.splits import HEAD, feed_forward, head_counts, heads_of
from tgi_server.engine.parallel.plan import ShardingPlan, column_parallel, row_parallel, vocab_parallel_embedding
from tgi_server.engine.parallel.shares import queries_keys_values, query_heads


def mpt(config: Any) -> DecoderSpec:
    layer = LayerSpec(
        attention="attn",
        qkv=("attn.Wqkv",),
        clip=config.attn_config.clip_qkv or 0.0,
        output="attn.out_proj",
        up=("ffn.up_proj",),
        down="ffn.down_proj",
        attention_norm="norm_1",
        feed_forward_norm="norm_2",
        rope=None,
        alibi="interleaved",
        scaling=config.attn_config.softmax_scale,
    )
    return DecoderSpec.uniform(
        config, layer, activation="gelu", gated_mlp=False, layer_list="blocks", final_norm="norm_f", ropes=()
    )


def _plan(config: Any) -> ShardingPlan:
    splits = {
        "wte": vocab_parallel_embedding(),
        "attn": head_counts("n_heads"),
        "attn.Wqkv": column_parallel(queries_keys_values),
        "attn.out_proj": row_parallel(query_heads),
        **feed_forward("ffn.up_proj", down="ffn.down_proj"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("attn",), splits)


FAMILIES = {"mpt": Family(mpt, _plan, relative=True)}
