"""Tiny models of newer families as GGUF files, with the names that the package `gguf` has for their tensors.

    file = write_gguf(make("lfm2", tmp_path / "lfm2"), tmp_path / "lfm2.gguf")

What llama.cpp's converter changes in tensors is changed here in the plainest way, by heads one after the other.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

from tests.gguf_hybrids import of_delta_rule, of_granite, of_state_space, state_space, times_multipliers
from tests.gguf_models import add_metadata, finish, words

ARCHITECTURES = {
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "gemma3n_text": gguf.MODEL_ARCH.GEMMA3N,
    "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "jamba": gguf.MODEL_ARCH.JAMBA,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
    "mamba": gguf.MODEL_ARCH.MAMBA,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H_MOE,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
}
# Settings of tiny models that files have no place for.
SETTINGS: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_chunk_size": 256},
    "gemma3n_text": {"tie_word_embeddings": True},
    "granitemoehybrid": {"mamba_chunk_size": 256},
    "granitemoehybrid dense": {"mamba_chunk_size": 256, "num_local_experts": 0, "num_experts_per_tok": 0},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"tie_word_embeddings": True},
    "mamba": {"num_attention_heads": 0},
    "nemotron_h": {"chunk_size": 128},
    "qwen3_next": {"norm_topk_prob": True},
}
# What the package's names lack.
_RENAMED = {
    "dt_bias": "dt_proj.bias",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "expert_bias": "expert_bias.bias",
    "correct_output_scale": "correct_output_scale.weight",
    "e_score_correction_bias": "e_score_correction.bias",
}
_PERMUTED = ("granitemoehybrid", "nemotron_h")


def write_gguf(model: Path, file: Path, kind: str = "F32") -> Path:
    """Writes a model as a GGUF file. kind: the type of matrices that are wide enough."""
    config = json.loads((model / "config.json").read_text())
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    architecture = ARCHITECTURES[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    entries = {f"{gguf.MODEL_ARCH_NAMES[architecture]}.{key}": value for key, value in _metadata(config).items()}
    add_metadata(writer, entries | words(config["vocab_size"]))
    for name, tensor in _tensors(config, load_file(model / "model.safetensors")).items():
        for old, new in _RENAMED.items():
            name = name.replace(old, new) if name.endswith(old) else name
        found = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert found is not None, name
        array = np.ascontiguousarray(tensor.float().numpy())
        own = kind if array.ndim > 1 and array.shape[-1] % 32 == 0 and "gate_inp" not in found else "F32"
        quantized = GGMLQuantizationType[own]
        writer.add_tensor(found, gguf.quantize(array, quantized), raw_dtype=quantized)
    if config["model_type"] == "gemma4_text":
        rotated, size = _full_rotation(config)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * rotated + [1e30] * (size // 2 - rotated), np.float32))
    finish(writer)
    return file


def _full_rotation(config: dict[str, Any]) -> tuple[int, int]:
    """Returns how many pairs of a head are turned in layers without a window, and the size of these heads."""
    size = next(iter(config["per_layer_config"].values()))["head_dim"]
    return int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2), size


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    kinds = config.get("layer_types", [])
    kv_heads: Any = config.get("num_key_value_heads")
    rope = config.get("rope_parameters") or {"rope_theta": 10_000.0}
    eps = next(config[name] for name in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if name in config)
    known = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config.get("num_attention_heads", 0),
        "attention.layer_norm_rms_epsilon": float(eps),
        "attention.key_length": config.get("head_dim"),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
        "expert_count": config.get("num_experts", config.get("num_local_experts", config.get("n_routed_experts"))),
        "expert_used_count": config.get("num_experts_per_tok", config.get("top_k_experts")),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if "conv_L_cache" in config:
        kv_heads = [0 if kind == "conv" else kv_heads for kind in kinds]
        known |= {
            "shortconv.l_cache": config["conv_L_cache"],
            "leading_dense_block_count": config.get("num_dense_layers"),
        }
    if "linear_num_key_heads" in config:
        values = config["linear_num_value_heads"]
        known |= {
            "ssm.conv_kernel": config["linear_conv_kernel_dim"],
            "ssm.state_size": config["linear_key_head_dim"],
            "ssm.group_count": config["linear_num_key_heads"],
            "ssm.time_step_rank": values,
            "ssm.inner_size": config["linear_value_head_dim"] * values,
            "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
            "rope.dimension_count": int(config["head_dim"] * rope["partial_rotary_factor"]),
        }
    if config["model_type"] == "gemma3n_text":
        known |= _of_gemma3n(config)
    if (sizes := state_space(config)) is not None:
        inner, heads, groups, state = sizes
        known |= {
            "ssm.conv_kernel": config.get("mamba_d_conv", config.get("conv_kernel")),
            "ssm.inner_size": inner,
            "ssm.state_size": state,
            "ssm.time_step_rank": heads,
            "ssm.group_count": groups,
        }
    if config["model_type"] == "granitemoehybrid":
        kv_heads = [0 if kind == "linear_attention" else kv_heads for kind in kinds]
        known |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"],
            "rope.scaling.finetuned": False,
        }
    if config["model_type"] == "nemotron_h":
        kinds = config["layers_block_type"]
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in kinds]
        known |= {
            "feed_forward_length": [config["moe_intermediate_size"] if kind == "moe" else 0 for kind in kinds],
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "expert_weights_scale": config["routed_scaling_factor"],
        }
    if config["model_type"] == "gemma4_text":
        windowed = [kind == "sliding_attention" for kind in kinds]
        wide = next(iter(config["per_layer_config"].values()))
        shared = config["num_kv_shared_layers"]
        kv_heads = [kv_heads if each else wide.get("num_key_value_heads", kv_heads) for each in windowed]
        widths = [config["intermediate_size"]] * (len(kinds) - shared)
        known |= {
            "attention.key_length": wide["head_dim"],
            "attention.key_length_swa": config["head_dim"],
            "attention.sliding_window": config["sliding_window"],
            "attention.sliding_window_pattern": windowed,
            "attention.shared_kv_layers": shared,
            "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
            "feed_forward_length": widths + [(1 + config["use_double_wide_mlp"]) * widths[0]] * shared,
            "final_logit_softcapping": config["final_logit_softcapping"],
            "rope.freq_base_swa": float(rope["sliding_attention"]["rope_theta"]),
        }
    known["attention.head_count_kv"] = kv_heads
    return known


def _of_gemma3n(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config["layer_types"]],
        "attention.shared_kv_layers": config["num_kv_shared_layers"],
        "embedding_length_per_layer_input": config["hidden_size_per_layer_input"],
        "altup.active_idx": config["altup_active_idx"],
        "altup.num_inputs": config["altup_num_inputs"],
        "activation_sparsity_scale": [
            float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(each)))
            for each in config["activation_sparsity_pattern"]
        ],
        "final_logit_softcapping": config["final_logit_softcapping"],
        "rope.freq_base_swa": float(config["rope_parameters"]["sliding_attention"]["rope_theta"]),
    }


def _tensors(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors as a file has them, by their names in `transformers`."""
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        if ".experts." in name and name.endswith(".weight"):
            place, _, rest = name.partition(".experts.")
            part = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}.get(rest.split(".")[1], rest.split(".")[1])
            experts.setdefault(f"{place}.experts.{part}.weight", []).append(tensor)
            continue
        if "linear_attn" in name:
            found |= of_delta_rule(config, name, tensor)
            continue
        if ".altup_projections." in name or ".altup_unembed_projections." in name:
            experts.setdefault(f"{name.rpartition('.')[0].rpartition('.')[0]}.weight", []).append(tensor)
            continue
        if config["model_type"] == "granitemoehybrid" and name.endswith(("put_linear.weight", "put_linear.bias")):
            found |= of_granite(name, tensor, experts=config["num_local_experts"] > 0)
            continue
        if config["model_type"] == "falcon_h1":
            tensor = times_multipliers(config, name, tensor)
        if config["model_type"] in _PERMUTED and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if ".mamba." in name or ".mixer." in name:
            tensor = of_state_space(config, name, tensor)
        if name.endswith(("gate_up_proj", "down_proj")):
            name += ".weight"
        if "conv.conv" in name:
            tensor = tensor.squeeze(1)
        if name.endswith("norm.weight") and config["model_type"].startswith("qwen"):
            tensor = tensor + 1
        found[name] = tensor
    named = {name.replace("feed_forward", "mlp"): torch.stack(each) for name, each in experts.items()}
    return found | {
        name.replace("backbone", "model").replace("mixer.experts", "mlp.experts"): each for name, each in named.items()
    }


def by_value_head(config: dict[str, Any], path: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a matrix of an adapter of a delta rule: outputs, or the inputs of its out_proj, as files order them."""
    (changed,) = of_delta_rule(config, path, tensor).values()
    return changed
