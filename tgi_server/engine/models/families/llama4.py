"""Llama 4: layers with rotary positions attend in chunks; the others look at all tokens, and scale their queries."""

from typing import Any

from tgi_server.engine.models.spec import DecoderSpec, Family, LayerSpec, MixtureSpec, RopeSpec, activation
from tgi_server.engine.models.splits import LLAMA, heads_of
from tgi_server.engine.parallel.layers import RowParallel
from tgi_server.engine.parallel.plan import ShardingPlan, Slice, Split
from tgi_server.engine.parallel.shares import halves


def llama4(config: Any) -> DecoderSpec:
    """Returns the spec. Some feed-forward parts are mixtures with a shared expert.

    `transformers` normalises queries and keys after the rotation; their norm has no weights, so before is the same.
    """
    layers = (
        _layer(config, rotary=bool(rotary), mixed=index in config.moe_layers)
        for index, rotary in enumerate(config.no_rope_layers)
    )
    ropes = (RopeSpec(table="complex"),)
    return DecoderSpec(tuple(layers), activation=activation(config.hidden_act), ropes=ropes, interleaved=True)


def _layer(config: Any, *, rotary: bool, mixed: bool) -> LayerSpec:
    norm = "self_attn.qk_norm" if rotary and config.use_qk_norm else None
    dense = "feed_forward.shared_expert" if mixed else "feed_forward"
    return LayerSpec(
        up=(f"{dense}.gate_proj", f"{dense}.up_proj"),
        down=f"{dense}.down_proj",
        mixture=_MIXTURE if mixed else None,
        shared=mixed,
        query_norm=norm,
        key_norm=norm,
        rope=0 if rotary else None,
        chunk=config.attention_chunk_size if rotary else 0,
        tuning=(config.floor_scale, config.attn_scale) if config.attn_temperature_tuning and not rotary else None,
    )


_MIXTURE = MixtureSpec("feed_forward", "router", sigmoid=True, normalised=False, share_inputs=True)


def _plan(config: Any) -> ShardingPlan:
    experts = Split({"gate_up_proj": Slice(2, halves), "down_proj": Slice(1)}, RowParallel)
    return ShardingPlan(heads_of(config), ("self_attn",), {**LLAMA, "experts": experts}, ("router",))


FAMILIES = {
    "llama4_text": Family(llama4, _plan),
    "llama4": Family(images=True, image_projector="multi_modal_projector"),
}
