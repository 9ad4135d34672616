"""OPT: layer norms, learned positions, a feed-forward part without a gate."""

from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, NoSpec, activation
from tgi_server.engine.models.splits import HEAD, attention, feed_forward, head_counts, heads_of
from tgi_server.engine.parallel.plan import ShardingPlan, vocab_parallel_embedding


def opt(config: Any) -> DecoderSpec:
    if not config.do_layer_norm_before or config.word_embed_proj_dim != config.hidden_size:
        raise NoSpec("its norms come after attention, or its embeddings are projected")
    if not config.layer_norm_elementwise_affine:
        raise NoSpec("its norms have no weights")
    layer = LayerSpec(
        output="self_attn.out_proj",
        up=("fc1",),
        down="fc2",
        attention_norm="self_attn_layer_norm",
        feed_forward_norm="final_layer_norm",
        rope=None,
        scaling=(config.hidden_size // config.num_attention_heads) ** -0.5,
    )
    final_norm = None if config._remove_final_layer_norm else "final_layer_norm"
    return DecoderSpec.uniform(
        config,
        layer,
        activation=activation(config.activation_function),
        gated_mlp=False,
        final_norm=final_norm,
        positions="embed_positions",
        ropes=(),
    )


def _plan(config: Any) -> ShardingPlan:
    splits = {
        "embed_tokens": vocab_parallel_embedding(),
        "self_attn": head_counts("num_heads"),
        **attention("self_attn", "out_proj"),
        **feed_forward("fc1", down="fc2"),
        **HEAD,
    }
    return ShardingPlan(heads_of(config), ("self_attn",), splits, ("embed_positions", "project_in", "project_out"))


FAMILIES = {"opt": Family(opt, _plan)}
