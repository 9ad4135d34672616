"""Bamba, Granite 4, Falcon-H1, Nemotron-H and Jamba: Mamba in most layers, attention in the others, or in all."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from tgi_server.engine.models.spec import (
    DecoderSpec,
    Family,
    LayerSpec,
    MixerSpec,
    MixtureSpec,
    NoSpec,
    RopeSpec,
    activation,
)
from tgi_server.engine.models.splits import EXPERTS, HEAD, Splits, attention, feed_forward, heads_of, llama_plan
from tgi_server.engine.parallel.group import ShardGroup
from tgi_server.engine.parallel.layers import RowParallel, ShardedGatedNorm
from tgi_server.engine.parallel.plan import (
    ShardingPlan,
    Slice,
    Split,
    column_parallel,
    row_parallel,
    vocab_parallel_embedding,
)
from tgi_server.engine.parallel.shares import (
    Heads,
    Share,
    halves,
    key_heads,
    of_heads,
    parts,
    query_heads,
    sections,
    share_of,
)

_BAMBA = LayerSpec(
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    feed_forward_norm="pre_ff_layernorm",
)
_MAMBA2 = MixerSpec("mamba", "mamba2")
_GRANITE = LayerSpec(up=("shared_mlp.input_linear",), down="shared_mlp.output_linear")


def bamba(config: Any) -> DecoderSpec:
    layers = _with_mixers(_BAMBA, _MAMBA2, config.layer_types)
    return DecoderSpec(layers, activation=activation(config.hidden_act), final_norm="final_layernorm")


def falcon(config: Any) -> DecoderSpec:
    """Each layer has both attention and Mamba-2; outputs of linear layers are multiplied by factors of config.json."""
    if config.attention_bias or config.mamba_proj_bias:
        raise NoSpec("its inputs are multiplied before layers with a bias")
    into, (gate, down) = config.attention_in_multiplier, config.mlp_multipliers
    scales: dict[str, float | tuple[float, str]] = {
        "self_attn.q_proj": into,
        "self_attn.k_proj": into * config.key_multiplier,
        "self_attn.v_proj": into,
        "self_attn.o_proj": config.attention_out_multiplier,
        "mamba.in_proj": (config.ssm_in_multiplier, "mamba.mup_vector"),
        "mamba.out_proj": config.ssm_out_multiplier,
        "feed_forward.gate_proj": gate,
        "feed_forward.down_proj": down,
    }
    return DecoderSpec.uniform(
        config,
        replace(_BAMBA, mixer=_MAMBA2, beside=True, scales=scales),
        activation=activation(config.hidden_act),
        final_norm="final_layernorm",
        embedding_scale=config.embedding_multiplier,
        logits_divisor=1 / config.lm_head_multiplier,
    )


def granite(config: Any) -> DecoderSpec:
    """Returns the spec of Granite 4; with experts, every token has a shared one beside its own."""
    rotary = config.position_embedding_type == "rope"
    mixture = MixtureSpec("block_sparse_moe", "router") if config.num_local_experts else None
    layer = replace(_GRANITE, rope=0 if rotary else None, mixture=mixture, shared=mixture is not None)
    return DecoderSpec(
        _with_mixers(layer, _MAMBA2, config.layer_types),
        activation=activation(config.hidden_act),
        ropes=(RopeSpec(),) if rotary else (),
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_divisor=config.logits_scaling,
    )


def jamba(config: Any) -> DecoderSpec:
    """There are no rotary positions: Mamba's states depend on the order of tokens."""
    plain, mamba = replace(_BAMBA, rope=None), MixerSpec("mamba", "mamba")
    mixed = replace(plain, mixture=MixtureSpec("feed_forward", "router", normalised=False))
    experts = config.layers_num_experts or [1] * config.num_hidden_layers
    layers = [mixed if count > 1 else plain for count in experts]
    kinds = zip(layers, config.layer_types, strict=True)
    return DecoderSpec(
        tuple(layer for each, kind in kinds for layer in _with_mixers(each, mamba, [kind])),
        activation=activation(config.hidden_act),
        final_norm="final_layernorm",
        ropes=(),
    )


def nemotron(config: Any) -> DecoderSpec:
    """A layer has one part: Mamba, attention, a mixture or a plain feed-forward part."""
    if config.moe_latent_size is not None:
        raise NoSpec("its experts compute in latents")
    without = LayerSpec(attention=None, attention_norm=None, up=(), feed_forward_norm=None, rope=None)
    kinds = {
        "linear_attention": replace(without, mixer=MixerSpec("mixer", "mamba2"), attention_norm="norm"),
        "full_attention": replace(
            without,
            attention="mixer",
            qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
            output="mixer.o_proj",
            attention_norm="norm",
        ),
        "mlp": replace(without, up=("mixer.up_proj",), down="mixer.down_proj", feed_forward_norm="norm"),
        "moe": replace(
            without,
            mixture=MixtureSpec.deepseek(config, "mixer"),
            shared=True,
            up=("mixer.shared_experts.up_proj",),
            down="mixer.shared_experts.down_proj",
            feed_forward_norm="norm",
        ),
    }
    return DecoderSpec(
        tuple(kinds[kind] for kind in config.layers_block_type),
        activation=activation(config.mlp_hidden_act),
        gated_mlp=False,
        final_norm="norm_f",
        ropes=(),
    )


def _with_mixers(layer: LayerSpec, mixer: MixerSpec, kinds: Iterable[str]) -> tuple[LayerSpec, ...]:
    return tuple(replace(layer, mixer=mixer) if kind == "linear_attention" else layer for kind in kinds)


def _mamba2(name: str, heads: int, groups: int, head_size: int, state_size: int) -> Splits:
    """Returns the splits of the modules that are called `name` and compute Mamba-2 (Dao and Gu, 2024).

    The heads of a group have B and C in common, as query heads have keys: several shards may have the same ones.
    """
    layout = Heads(heads, groups, ("Mamba heads", "groups"))
    of_head, of_group = of_heads(layout, query_heads), of_heads(layout, key_heads)
    inner, shared = (heads * head_size, of_head), (groups * state_size, of_group)
    convolved = sections(inner, shared, shared)
    projected = sections(inner, inner, shared, shared, (heads, of_head))
    of_each_head = dict.fromkeys(("A_log", "D", "dt_bias"), Slice(0, of_head))
    sizes = {"num_heads": of_head, "intermediate_size": of_head, "n_groups": of_group, "conv_dim": convolved}
    norm = partial(_norm, layout)
    return {
        name: Split({**of_each_head, "mup_vector": Slice(2, projected)}, sizes=sizes),
        f"{name}.conv1d": column_parallel(convolved),
        f"{name}.in_proj": column_parallel(projected),
        f"{name}.norm": Split({"weight": Slice(0, of_head)}, norm),
        f"{name}.out_proj": row_parallel(of_head),
    }


def _norm(heads: Heads, module: Any, group: ShardGroup, share: Share) -> ShardedGatedNorm:
    """Returns the layer around a gated norm, whose groups (Falcon-H1) or features of a group become the shard's."""
    own = share_of(share.rank, share.world_size, heads)
    if hasattr(module, "n_groups"):
        module.n_groups = len(own.keys)
    elif hasattr(module, "group_size"):
        module.group_size = len(module.weight) // len(own.keys)
    return ShardedGatedNorm(module, group, own)


def _plan(config: Any) -> ShardingPlan:
    """Returns the plan of Bamba, Granite 4 and Falcon-H1."""
    experts = {
        "block_sparse_moe.input_linear": Split({"weight": Slice(1, halves)}),
        "block_sparse_moe.output_linear": Split({"weight": Slice(2)}),
        "shared_mlp.input_linear": column_parallel(halves),
        "shared_mlp.output_linear": row_parallel(),
    }
    mamba = _mamba2("mamba", config.mamba_n_heads, config.mamba_n_groups, config.mamba_d_head, config.mamba_d_state)
    return llama_plan(config, {**EXPERTS, **experts, **mamba}, whole=("router",))


def _nemotron_plan(config: Any) -> ShardingPlan:
    """Returns the plan of Nemotron-H, where every kind of module in a layer is called `mixer`."""
    mamba, attending = (_layers(config, kind) for kind in ("linear_attention", "full_attention"))
    experts = {
        "experts": Split({"up_proj": Slice(1), "down_proj": Slice(2)}, RowParallel, sizes={"intermediate_dim": parts}),
        **feed_forward("up_proj", down="down_proj"),
    }
    splits = {"embeddings": vocab_parallel_embedding(), "embed_tokens": vocab_parallel_embedding(), **experts, **HEAD}
    for name in attending:
        splits |= attention(name)
    for name in mamba:
        sizes = config.mamba_num_heads, config.n_groups, config.mamba_head_dim, config.ssm_state_size
        splits |= _mamba2(name, *sizes)
    whole = ("gate", "fc1_latent_proj", "fc2_latent_proj")
    return ShardingPlan(heads_of(config), attending, splits, whole)


def _layers(config: Any, kind: str) -> tuple[str, ...]:
    """Returns the ends of the paths of a kind of mixers."""
    return tuple(f"layers.{index}.mixer" for index, each in enumerate(config.layers_block_type) if each == kind)


def _jamba_plan(config: Any) -> ShardingPlan:
    """Mamba (Gu and Dao, 2023) has no heads: a shard has some channels. Steps, B and C depend on all channels."""
    mamba = {
        "mamba": Split({"A_log": Slice(0), "D": Slice(0)}, sizes={"intermediate_size": parts}),
        "mamba.in_proj": column_parallel(halves),
        "mamba.conv1d": column_parallel(),
        "mamba.x_proj": row_parallel(),
        "mamba.dt_proj": column_parallel(),
        "mamba.out_proj": row_parallel(),
    }
    return llama_plan(config, {**EXPERTS, **mamba}, whole=("router",))


FAMILIES = {
    "bamba": Family(bamba, _plan),
    "granitemoehybrid": Family(granite, _plan),
    "falcon_h1": Family(falcon, _plan),
    "nemotron_h": Family(nemotron, _nemotron_plan),
    "jamba": Family(jamba, _jamba_plan),
}
