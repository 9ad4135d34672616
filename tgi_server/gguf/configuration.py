"""The metadata of GGUF files, and the settings of `transformers` that they stand for, by the family of the model."""

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from tgi_server.gguf.file import Gguf
from tgi_server.gguf.paths import GgufError

Config = dict[str, Any]


class Metadata:
    """The metadata of a model, by their names without that of the architecture."""

    def __init__(self, file: Gguf) -> None:
        self.file = file

    def get(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.file.architecture}.{name}", default)

    def number(self, name: str, default: float | None = None) -> Any:
        """Returns a number, the same for all layers. Raises GgufError."""
        found = self.get(name, default)
        if isinstance(found, list) and found and all(each == found[0] for each in found):
            found = found[0]
        if not isinstance(found, int | float):
            what = "differs between layers, which is not served" if isinstance(found, list) else f"is {found!r}"
            raise GgufError(f"{self.file.path}: {self.file.architecture}.{name} {what}; a number is needed")
        return found

    def most(self, name: str, default: Any = None) -> Any:
        """Returns the largest of the layers' numbers."""
        found = self.get(name, default)
        return max(found, default=default) if isinstance(found, list) else self.number(name, default)

    def least(self, name: str) -> Any:
        """Returns the smallest of the layers' numbers."""
        found = self.get(name)
        return min(found) if isinstance(found, list) and found else self.number(name)

    def of_layers(self, name: str, default: Any = None) -> list[Any]:
        """Returns a value for each layer."""
        found = self.get(name, default)
        return found[: self.layers] if isinstance(found, list) else [found] * self.layers

    @property
    def layers(self) -> int:
        """The number of layers, without those that only draft."""
        return int(self.number("block_count") - self.get("nextn_predict_layers", 0))

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def values(self, tensor: str) -> list[float]:
        """Returns the numbers of a tensor in float32."""
        found = self.file.tensors[tensor]
        if found.kind is not GGMLQuantizationType.F32:
            raise GgufError(f"{self.file.path}: tensor {tensor} is of {found.kind.name}; F32 is needed")
        return [float(each) for each in found.raw.view(np.float32).ravel()]

    @property
    def head_dim(self) -> int:
        own = self.get("attention.key_length")
        return int(own or self.number("embedding_length") // (self.number("attention.head_count") or 1))

    def layers_with(self, tensor: str) -> list[int]:
        """Returns the numbers of the layers that have a tensor."""
        return [layer for layer in range(self.layers) if self.has(f"blk.{layer}.{tensor}")]


def dtype_of(file: Gguf) -> str:
    """Returns the dtype to compute in: that of the weights where they are not quantised, else bfloat16."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def rope(given: Metadata) -> Config:
    rope: Config = {"rope_theta": given.number("rope.freq_base", 10_000.0), "rope_type": "default"}
    scaling, factor = given.get("rope.scaling.type"), given.get("rope.scaling.factor")
    original = given.get("rope.scaling.original_context_length")
    if given.has("rope_freqs.weight"):
        return rope | _llama3_rope(given, rope["rope_theta"])
    if given.has("rope_factors_long.weight"):
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": original}
        rope |= {f"{name}_factor": given.values(f"rope_factors_{name}.weight") for name in ("long", "short")}
        if (attention := given.get("rope.scaling.attn_factor")) is not None:
            rope["attention_factor"] = attention
    elif scaling in ("linear", "yarn") and factor and factor != 1:
        rope |= {"rope_type": scaling, "factor": factor}
        if scaling == "yarn":
            rope["original_max_position_embeddings"] = original or given.number("context_length")
    elif scaling not in (None, "none", "linear", "yarn", "longrope"):
        raise GgufError(f"{given.file.path}: rope.scaling.type is {scaling!r}, which is not served")
    return rope


def _llama3_rope(given: Metadata, theta: float) -> Config:
    """Returns the settings of Llama 3's rotary embedding, which a file has only as the factor of each frequency."""
    found = np.array(given.values("rope_freqs.weight"))
    lengths = 2 * math.pi * theta ** (np.arange(len(found)) / len(found))
    factor = float(found.max())
    for original in (8192, *(2**power for power in range(4, 24))):  # all published models have the first
        smooth = np.clip((original / lengths - 1) / 3, 0, 1)
        factors = 1 / ((1 - smooth) / factor + smooth)
        if np.allclose(factors, found, rtol=1e-4):
            settings = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": original}
            return {"rope_type": "llama3", "factor": factor, **settings}
    raise GgufError(f"{given.file.path}: rope_freqs.weight are not those of Llama 3, which is not served")


def partial_rope(given: Metadata) -> Config:
    size = given.number("rope.dimension_count", given.head_dim)
    share = size / given.head_dim
    return {"rope_parameters": {**rope(given), "partial_rotary_factor": share}, "partial_rotary_factor": share}


def llama(given: Metadata) -> Config:
    return {"mlp_bias": given.has("blk.0.ffn_gate.bias")}


def mixtral(given: Metadata) -> Config:
    used = given.number("expert_used_count")
    return {"num_local_experts": given.number("expert_count"), "num_experts_per_tok": used}


def qwen_moe(given: Metadata) -> Config:
    shared = given.get("expert_shared_feed_forward_length")
    own = {
        "num_experts": given.number("expert_count"),
        "num_experts_per_tok": given.number("expert_used_count"),
        "moe_intermediate_size": given.number("expert_feed_forward_length"),
        "norm_topk_prob": given.file.architecture == "qwen3moe",
    }
    return own | ({"shared_expert_intermediate_size": shared} if shared else {})


def gemma(given: Metadata) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def gemma2(given: Metadata) -> Config:
    # The model of 27B parameters divides by the width of a head as if all heads together were as wide as the model.
    large = given.number("block_count") == 46
    scalar = given.number("embedding_length") // given.number("attention.head_count") if large else given.head_dim
    return gemma(given) | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": given.number("attention.sliding_window"),
        "attn_logit_softcapping": given.get("attn_logit_softcapping"),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
    }


def gemma3(given: Metadata) -> Config:
    large = given.number("block_count") == 62
    scalar = given.number("embedding_length") // given.number("attention.head_count") if large else given.head_dim
    local = given.number("rope.freq_base_swa", 10_000.0)
    return gemma(given) | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": given.number("attention.sliding_window"),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {"rope_theta": 1_000_000.0} | rope(given),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def phi3(given: Metadata) -> Config:
    window = given.get("attention.sliding_window")
    original = given.get("rope.scaling.original_context_length") or given.number("context_length")
    return partial_rope(given) | {"sliding_window": window or None, "original_max_position_embeddings": original}


def granite(given: Metadata) -> Config:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    # What a file leaves out has no effect.
    plain = {"attention_multiplier": given.head_dim**-0.5}
    return {name: given.get(key, plain.get(name, 1.0)) for name, key in names.items()} | llama(given)


def smollm3(given: Metadata) -> Config:
    return {"no_rope_layer_interval": 4, "use_sliding_window": False, "mlp_bias": given.has("blk.0.ffn_gate.bias")}


def gpt_oss(given: Metadata) -> Config:
    return mixtral(given) | {
        "intermediate_size": given.number("expert_feed_forward_length"),
        "sliding_window": given.number("attention.sliding_window"),
        "rope_parameters": {**rope(given), "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    }


def starcoder2(given: Metadata) -> Config:
    biases = given.has("blk.0.attn_q.bias")
    return {"norm_epsilon": given.number("attention.layer_norm_epsilon"), "use_bias": biases}


def cohere(given: Metadata) -> Config:
    eps = given.number("attention.layer_norm_epsilon")
    return {
        "layer_norm_eps": eps,
        "logit_scale": given.number("logit_scale"),
        "use_qk_norm": given.has("blk.0.attn_q_norm.weight"),
    }


def linear_attention(given: Metadata) -> Config:
    """Returns the settings of layers with a gated delta rule, beside those of attention."""
    value_heads = given.number("ssm.time_step_rank")
    interval = given.get("full_attention_interval", 4)
    recurrent = given.get("attention.recurrent_layers") or [(layer + 1) % interval for layer in range(given.layers)]
    share = given.number("rope.dimension_count", given.head_dim // 4) / given.head_dim
    return {
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[: given.layers]],
        "linear_conv_kernel_dim": given.number("ssm.conv_kernel"),
        "linear_key_head_dim": given.number("ssm.state_size"),
        "linear_num_key_heads": given.number("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": given.number("ssm.inner_size") // value_heads,
        "rope_parameters": {**rope(given), "partial_rotary_factor": share},
    }


def qwen_linear_moe(given: Metadata) -> Config:
    return qwen_moe(given) | linear_attention(given) | {"norm_topk_prob": True, "decoder_sparse_step": 1}


def lfm2(given: Metadata) -> Config:
    heads = given.of_layers("attention.head_count_kv")
    return {
        "norm_eps": given.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": given.number("shortconv.l_cache"),
        "conv_bias": given.has("blk.0.shortconv.conv.bias"),
        "layer_types": ["full_attention" if each else "conv" for each in heads],
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


def gemma4(given: Metadata) -> Config:
    windowed = given.of_layers("attention.sliding_window_pattern")
    kinds = ["sliding_attention" if each else "full_attention" for each in windowed]
    heads = given.of_layers("attention.head_count_kv")
    of_kind = dict(zip(kinds, heads, strict=True))
    shared = given.number("attention.shared_kv_layers", 0)
    own = range(given.layers - shared)
    widths = given.of_layers("feed_forward_length")
    size = given.head_dim
    frequencies = given.values("rope_freqs.weight") if given.has("rope_freqs.weight") else [1.0] * (size // 8)
    rotated = sum(each == 1 for each in frequencies)
    experts = given.get("expert_count")
    return gemma(given) | {
        "layer_types": kinds,
        "head_dim": given.number("attention.key_length_swa", size),
        "global_head_dim": size,
        "num_key_value_heads": of_kind.get("sliding_attention", heads[0]),
        "num_global_key_value_heads": of_kind.get("full_attention"),
        "attention_k_eq_v": any(not given.has(f"blk.{layer}.attn_v.weight") for layer in own),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": given.number("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": given.file.tensors["token_embd.weight"].shape[0],
        "sliding_window": given.number("attention.sliding_window"),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
        "enable_moe_block": bool(experts),
        "num_experts": experts or None,
        "top_k_experts": given.get("expert_used_count") or None,
        "moe_intermediate_size": given.get("expert_feed_forward_length") or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * rotated / size,
                "rope_theta": given.number("rope.freq_base", 1_000_000.0),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def gemma3n(given: Metadata) -> Config:
    windowed = given.of_layers("attention.sliding_window_pattern")
    normal = NormalDist()
    return gemma(given) | {
        "intermediate_size": given.of_layers("feed_forward_length"),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "sliding_window": given.number("attention.sliding_window"),
        "num_kv_shared_layers": given.number("attention.shared_kv_layers", 0),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": given.number("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": given.file.tensors["per_layer_token_embd.weight"].shape[0],
        "altup_active_idx": given.number("altup.active_idx"),
        "altup_num_inputs": given.number("altup.num_inputs"),
        "laurel_rank": given.file.tensors["blk.0.laurel_l.weight"].shape[0],
        # Files have the deviation above which so large a share of numbers is not.
        "activation_sparsity_pattern": [
            round(normal.cdf(each), 6) for each in given.of_layers("activation_sparsity_scale")
        ],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1_000_000.0} | rope(given),
            "sliding_attention": {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", 10_000.0)},
        },
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
    """Returns its settings without multipliers, which files have multiplied the weights by."""
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
        granite(given)
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
    """Returns the first layer that has a tensor, and after how many layers the next one has it. Raises GgufError."""
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
