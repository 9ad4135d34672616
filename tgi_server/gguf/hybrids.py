"""The settings of `transformers` for families with states: short convolutions, delta rules and Mamba."""

from tgi_server.gguf import configuration
from tgi_server.gguf.configuration import Config
from tgi_server.gguf.metadata import Metadata
from tgi_server.gguf.paths import GgufError


def linear_attention(given: Metadata) -> Config:
    """Returns the settings of layers with a gated delta rule, beside those of attention."""
    value_heads = given.number("ssm.time_step_rank")
    interval = given.get("full_attention_interval", 4)
    recurrent = given.get("attention.recurrent_layers") or [(layer + 1) % interval for layer in range(given.layers)]
    share = given.number("rope.dimension_count", given.head_dim // 4) / given.head_dim
    return {
        "layer_types": ["linear_attention" if recurs else "full_attention" for recurs in recurrent[: given.layers]],
        "linear_conv_kernel_dim": given.number("ssm.conv_kernel"),
        "linear_key_head_dim": given.number("ssm.state_size"),
        "linear_num_key_heads": given.number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": given.number("ssm.inner_size") // value_heads,
        "rope_parameters": {**configuration.rope(given), "partial_rotary_factor": share},
    }


def qwen_linear_moe(given: Metadata) -> Config:
    return configuration.qwen_moe(given) | linear_attention(given) | {"norm_topk_prob": True, "decoder_sparse_step": 1}


def lfm2(given: Metadata) -> Config:
    heads = given.of_layers("attention.head_count_kv")
    return {
        "norm_eps": given.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": given.number("shortconv.l_cache"),
        "conv_bias": given.has("blk.0.shortconv.conv.bias"),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "block_auto_adjust_ff_dim": False,
    }


def lfm2_moe(given: Metadata) -> Config:
    dense = given.number("leading_dense_block_count", 0)
    return lfm2(given) | {
        "moe_intermediate_size": given.number("expert_feed_forward_length"),
        "num_dense_layers": dense,
        "num_experts": given.number("expert_count"),
        "num_experts_per_tok": given.number("expert_used_count"),
        "use_expert_bias": given.has(f"blk.{dense}.exp_probs_b.bias"),
        "norm_topk_prob": True,
    }


def _mamba2(given: Metadata) -> Config:
    heads, inner = given.number("ssm.time_step_rank"), given.number("ssm.inner_size")
    (first, *_) = given.layers_with("ssm_in.weight") or [0]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": given.number("ssm.group_count"),
        "mamba_d_state": given.number("ssm.state_size"),
        "mamba_d_conv": given.number("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // given.number("embedding_length")),
        "mamba_conv_bias": given.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": given.has(f"blk.{first}.ssm_in.bias"),
    }


def falcon_h1(given: Metadata) -> Config:
    """Returns its settings without multipliers, since weights in files have been multiplied by these."""
    return _mamba2(given) | {
        "mamba_d_ssm": given.number("ssm.inner_size"),
        "mamba_rms_norm": given.has("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "mlp_bias": given.has("blk.0.ffn_gate.bias"),
        "projectors_bias": given.has("blk.0.ssm_out.bias"),
        **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"), 1.0),
        **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
        **dict.fromkeys(("embedding_multiplier", "lm_head_multiplier"), 1.0),
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }


def granite_hybrid(given: Metadata) -> Config:
    mamba = given.layers_with("ssm_in.weight")
    width = given.number("feed_forward_length")
    kinds = ["mamba" if layer in mamba else "attention" for layer in range(given.layers)]
    turns = given.get("rope.scaling.finetuned", True)
    return (
        configuration.granite(given)
        | _mamba2(given)
        | {
            "layer_types": kinds,
            "num_local_experts": given.number("expert_count", 0),
            "num_experts_per_tok": given.number("expert_used_count", 0),
            "shared_intermediate_size": given.number("expert_shared_feed_forward_length", width),
            "position_embedding_type": "rope" if turns else None,
        }
    )


def jamba(given: Metadata) -> Config:
    size = given.number("embedding_length")
    attention = _every(given, "attn_q.weight")
    experts = _every(given, "ffn_gate_inp.weight")
    (first, *_) = given.layers_with("ssm_in.weight") or [0]
    return {
        "attn_layer_offset": attention[0],
        "attn_layer_period": attention[1],
        "expert_layer_offset": experts[0],
        "expert_layer_period": experts[1],
        "num_experts": given.number("expert_count", 1),
        "num_experts_per_tok": given.number("expert_used_count", 1),
        "mamba_d_state": given.number("ssm.state_size"),
        "mamba_d_conv": given.number("ssm.conv_kernel"),
        "mamba_dt_rank": given.number("ssm.time_step_rank"),
        "mamba_expand": given.number("ssm.inner_size") // size,
        "mamba_conv_bias": given.has(f"blk.{first}.ssm_conv1d.bias"),
        "mamba_proj_bias": given.has(f"blk.{first}.ssm_in.bias"),
        "rope_parameters": None,
    }


def _every(given: Metadata, tensor: str) -> tuple[int, int]:
    """Returns the first layer with a tensor, and the distance between layers with it. Raises GgufError."""
    layers = given.layers_with(tensor)
    first = layers[0] if layers else given.layers - 1
    period = layers[1] - first if len(layers) > 1 else given.layers
    if layers and layers != list(range(first, given.layers, period)):
        raise GgufError(f"{given.file.path}: layers {layers} have {tensor}, which is not served; they must be regular")
    return first, period


def mamba(given: Metadata) -> Config:
    return {
        "state_size": given.number("ssm.state_size"),
        "conv_kernel": given.number("ssm.conv_kernel"),
        "intermediate_size": given.number("ssm.inner_size"),
        "expand": given.number("ssm.inner_size") // given.number("embedding_length"),
        "time_step_rank": given.number("ssm.time_step_rank"),
        "layer_norm_epsilon": given.number("attention.layer_norm_rms_epsilon"),
        "use_bias": given.has("blk.0.ssm_in.bias"),
        "use_conv_bias": given.has("blk.0.ssm_conv1d.bias"),
        "rope_parameters": None,
    }


def nemotron_h(given: Metadata) -> Config:
    heads = given.number("ssm.time_step_rank")
    parts = {"mamba": "ssm_in", "attention": "attn_q", "moe": "ffn_gate_inp", "mlp": "ffn_up"}
    of_kind = {kind: given.layers_with(f"{part}.weight") for kind, part in parts.items()}
    dense = [given.file.tensors[f"blk.{layer}.ffn_up.weight"].shape[0] for layer in of_kind["mlp"]]
    eps = given.get("attention.layer_norm_rms_epsilon", given.get("attention.layer_norm_epsilon"))
    own = {
        "layers_block_type": [
            next((kind for kind, layers in of_kind.items() if layer in layers), None) for layer in range(given.layers)
        ],
        "intermediate_size": max(dense, default=given.get("expert_feed_forward_length", 0)),
        "layer_norm_epsilon": eps,
        "mamba_num_heads": heads,
        "mamba_head_dim": given.number("ssm.inner_size") // heads,
        "n_groups": given.number("ssm.group_count"),
        "ssm_state_size": given.number("ssm.state_size"),
        "conv_kernel": given.number("ssm.conv_kernel"),
        "use_conv_bias": any(given.has(f"blk.{layer}.ssm_conv1d.bias") for layer in of_kind["mamba"]),
        "rope_parameters": None,
    }
    if not of_kind["moe"]:
        return own
    return own | {
        "n_routed_experts": given.number("expert_count"),
        "num_experts_per_tok": given.number("expert_used_count"),
        "moe_intermediate_size": given.number("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": given.number("expert_shared_feed_forward_length"),
        "n_shared_experts": given.number("expert_shared_count", 1),
        "moe_latent_size": given.get("moe_latent_size"),
        "norm_topk_prob": given.get("expert_weights_norm", True),
        "routed_scaling_factor": given.number("expert_weights_scale", 1.0),
        "n_group": given.number("expert_group_count", 1),
        "topk_group": given.number("expert_group_used_count", 1),
    }
