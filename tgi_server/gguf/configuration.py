"""Converts the metadata of a GGUF file to settings of `transformers`, by the family of the model."""

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from tgi_server.gguf.metadata import Metadata
from tgi_server.gguf.paths import GgufError

Config = dict[str, Any]


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
    elif scaling in ("linear", "yarn") and factor and given.number("rope.scaling.factor") != 1:
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


def check_whole_rotation(given: Metadata, config: Config) -> None:
    """Raises GgufError if the file rotates a part of each head, in a family whose models rotate whole heads."""
    rope = config["rope_parameters"] or {}
    if any("partial_rotary_factor" in each for each in (rope, *rope.values()) if isinstance(each, dict)):
        return
    size = given.number("rope.dimension_count", given.head_dim)
    if rope and size != given.head_dim:
        raise GgufError(
            f"{given.file.path}: {given.file.architecture}.rope.dimension_count is {size}, and a head has "
            f"{given.head_dim} numbers; a rotation of a part of them is not served for this architecture"
        )


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


def gemma4(given: Metadata) -> Config:
    windowed = given.of_layers("attention.sliding_window_pattern")
    kinds = ["sliding_attention" if windowed_layer else "full_attention" for windowed_layer in windowed]
    heads = given.of_layers("attention.head_count_kv")
    of_kind = dict(zip(kinds, heads, strict=True))
    shared = given.number("attention.shared_kv_layers", 0)
    own = range(given.layers - shared)
    widths = given.of_layers("feed_forward_length")
    size = given.head_dim
    frequencies = given.values("rope_freqs.weight") if given.has("rope_freqs.weight") else [1.0] * (size // 8)
    rotated = sum(frequency == 1 for frequency in frequencies)
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
        "layer_types": ["sliding_attention" if windowed_layer else "full_attention" for windowed_layer in windowed],
        "sliding_window": given.number("attention.sliding_window"),
        "num_kv_shared_layers": given.number("attention.shared_kv_layers", 0),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
        "hidden_size_per_layer_input": given.number("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": given.file.tensors["per_layer_token_embd.weight"].shape[0],
        "altup_active_idx": given.number("altup.active_idx"),
        "altup_num_inputs": given.number("altup.num_inputs"),
        "laurel_rank": given.file.tensors["blk.0.laurel_l.weight"].shape[0],
        # Files have a threshold in standard deviations, `transformers` the share of numbers below it.
        "activation_sparsity_pattern": [
            round(normal.cdf(each), 6) for each in given.of_layers("activation_sparsity_scale")
        ],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1_000_000.0} | rope(given),
            "sliding_attention": {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", 10_000.0)},
        },
    }


def nomic_bert(given: Metadata) -> Config:
    return {
        "layer_norm_eps": given.number("attention.layer_norm_epsilon"),
        "type_vocab_size": given.file.tensors["token_types.weight"].shape[0],
    }


def bert(given: Metadata) -> Config:
    positions = given.file.tensors["position_embd.weight"].shape[0]
    return nomic_bert(given) | {"max_position_embeddings": positions, "rope_parameters": None}


# The kinds of pooling in files, and their names in sentence-transformers.
_POOLINGS = {1: "pooling_mode_mean_tokens", 2: "pooling_mode_cls_token", 3: "pooling_mode_lasttoken"}
_RANK = 4


def pooling(given: Metadata) -> Config:
    """Returns the content of 1_Pooling/config.json for a model that embeds; nothing for others. Raises GgufError."""
    kind = given.get("pooling_type")
    if kind == _RANK:
        raise GgufError(
            f"{given.file.path} is a rerank model, which is not served from GGUF files; take the model in transformers "
            "format"
        )
    return {"word_embedding_dimension": given.number("embedding_length"), _POOLINGS[kind]: True} if kind else {}
