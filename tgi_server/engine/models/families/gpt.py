"""GPT-2, GPTBigCode (SantaCoder, StarCoder), GPT-J, GPT-Neo, GPT-NeoX, Persimmon and Phi."""

from dataclasses import replace
from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, RopeSpec, activation
from tgi_server.engine.models.splits import HEAD, attention, feed_forward, head_counts, heads_of
from tgi_server.engine.parallel.plan import (
    ShardingPlan,
    column_parallel,
    row_parallel,
    vocab_parallel_embedding,
    vocab_parallel_head,
)
from tgi_server.engine.parallel.shares import Heads, queries_keys_values, query_heads

_GPT2 = LayerSpec(
    attention="attn",
    qkv=("attn.c_attn",),
    output="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    attention_norm="ln_1",
    feed_forward_norm="ln_2",
    rope=None,
)
_GPTJ = LayerSpec(
    attention="attn",
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    output="attn.out_proj",
    up=("mlp.fc_in",),
    down="mlp.fc_out",
    attention_norm="ln_1",
    feed_forward_norm=None,
)
_GPT_NEO = replace(
    _GPT2,
    attention="attn.attention",
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    output="attn.attention.out_proj",
    scaling=1.0,
)
_GPT_NEOX = LayerSpec(
    attention="attention",
    qkv=("attention.query_key_value",),
    grouped=True,
    output="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down="mlp.dense_4h_to_h",
)
_PHI = LayerSpec(output="self_attn.dense", up=("mlp.fc1",), down="mlp.fc2", feed_forward_norm=None)


def gpt2(config: Any, layer: LayerSpec = _GPT2) -> DecoderSpec:
    return DecoderSpec.uniform(
        config,
        layer,
        activation=activation(config.activation_function),
        gated_mlp=False,
        layer_list="h",
        final_norm="ln_f",
        positions="wpe",
        ropes=(),
    )


def gpt_bigcode(config: Any) -> DecoderSpec:
    return gpt2(config, replace(_GPT2, grouped=not config.multi_query))


def gptj(config: Any) -> DecoderSpec:
    rope = RopeSpec(table="half", rotated=config.rotary_dim or config.n_embd)
    return replace(gpt2(config, _GPTJ), positions=None, ropes=(rope,), interleaved=True, parallel=True)


def gpt_neo(config: Any) -> DecoderSpec:
    """Some layers attend to a window, which they do not pass to the attention function."""
    kinds = {"global": _GPT_NEO, "local": replace(_GPT_NEO, window=config.window_size)}
    return replace(gpt2(config), layers=tuple(kinds[name] for name in config.attention_layers))


def gpt_neox(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(
        config,
        _GPT_NEOX,
        activation=activation(config.hidden_act),
        gated_mlp=False,
        final_norm="final_layer_norm",
        parallel=getattr(config, "use_parallel_residual", False),
    )


def persimmon(config: Any) -> DecoderSpec:
    layer = replace(_GPT_NEOX, attention="self_attn", qkv=("self_attn.query_key_value",), output="self_attn.dense")
    spec = replace(gpt_neox(config), final_norm="final_layernorm")
    return replace(spec, layers=(_with_norms(config, layer),) * config.num_hidden_layers)


def phi(config: Any) -> DecoderSpec:
    return DecoderSpec.uniform(
        config,
        _with_norms(config, _PHI),
        activation=activation(config.hidden_act),
        gated_mlp=False,
        final_norm="final_layernorm",
        parallel=True,
    )


def _with_norms(config: Any, layer: LayerSpec) -> LayerSpec:
    if not config.qk_layernorm:
        return layer
    return replace(layer, query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm")


_EMBEDDING = {"wte": vocab_parallel_embedding()}


def _gpt2(config: Any) -> ShardingPlan:
    splits = {
        **_EMBEDDING,
        "attn": head_counts("split_size"),
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
        "attn": head_counts("num_heads", "embed_dim", of_keys=("kv_dim",)),
        "attn.c_attn": column_parallel(queries_keys_values if config.multi_query else query_heads),
        "attn.c_proj": row_parallel(query_heads),
        **feed_forward("mlp.c_fc", down="mlp.c_proj"),
        **HEAD,
    }
    return ShardingPlan(Heads(queries, 1 if config.multi_query else queries), ("attn",), splits, whole=("wpe",))


def _gptj(config: Any) -> ShardingPlan:
    splits = {
        **_EMBEDDING,
        "attn": head_counts("num_attention_heads"),
        **attention("attn", "out_proj"),
        **feed_forward("fc_in", down="fc_out"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("attn",), splits)


def _gpt_neo(config: Any) -> ShardingPlan:
    splits = {
        **_EMBEDDING,
        "attn.attention": head_counts("num_heads"),
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


def _persimmon(config: Any) -> ShardingPlan:
    splits = {
        "embed_tokens": vocab_parallel_embedding(),
        "self_attn": head_counts("num_heads"),
        "self_attn.query_key_value": column_parallel(query_heads),
        "self_attn.dense": row_parallel(query_heads),
        **feed_forward("dense_h_to_4h", down="dense_4h_to_h"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("self_attn",), splits)


def _phi(config: Any) -> ShardingPlan:
    splits = {
        "embed_tokens": vocab_parallel_embedding(),
        **attention("self_attn", "dense"),
        **feed_forward("fc1", down="fc2"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("self_attn",), splits)


FAMILIES = {
    "gpt2": Family(gpt2, _gpt2),
    "gpt_bigcode": Family(gpt_bigcode, _gpt_bigcode),
    "gpt_neo": Family(gpt_neo, _gpt_neo),
    "gpt_neox": Family(gpt_neox, _gpt_neox),
    "gptj": Family(gptj, _gptj),
    "persimmon": Family(persimmon, _persimmon),
    "phi": Family(phi, _phi),
}
