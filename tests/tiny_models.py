"""Tiny random models in the folders that `transformers` saves: of every architecture that the engine names, for the
engine, and one with a tokenizer, for servers.

    folder = make("llama", tmp_path / "llama", num_hidden_layers=3)
    served = make_llama(tmp_path / "served")

Matrices of the former are scaled up, so that the most likely token is clear and depends on every part of the model.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

VOCAB_SIZE = 199
# The vocabulary of the model that has a tokenizer.
TOKENIZER_VOCAB_SIZE = 320
# Tokens that sliding-window layers see: few, so that every test looks past them.
WINDOW = 8
# Factor by which matrices exceed the usual initial weights, whose deviation is 0.02.
SCALE = 6.0
# Deviation of what is added to biases and the weights of norms, which are all 0 or all 1 at first.
NOISE = 0.1

Settings = dict[str, Any]

_SMALL: Settings = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_TIED: Settings = {"tie_word_embeddings": True}
_GATED: Settings = {"intermediate_size": 96, "num_key_value_heads": 2}
_MIXED_WINDOWS: Settings = {"num_hidden_layers": 4, "sliding_window": WINDOW}
_ALTERNATING: Settings = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA: Settings = _GATED | {"head_dim": 32, "query_pre_attn_scalar": 24}
_GEMMA4: Settings = _GATED | {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "final_logit_softcapping": 10.0,
}
_LATENTS: Settings = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "intermediate_size": 96,
}
_LATENT_EXPERTS: Settings = {"moe_intermediate_size": 48, "first_k_dense_replace": 1, "n_routed_experts": 4} | {
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
# Of so many heads that no two tokens have the score 0, of which the reference takes now one, now the other.
# With fewer heads some tokens of the tests have the same score, zero, and it depends on the device which is chosen.
_INDEXED: Settings = {"index_topk": WINDOW, "index_n_heads": 20, "index_head_dim": 32}
_OPT: Settings = {"ffn_dim": 96, "word_embed_proj_dim": 64}
_FALCON_GROUPED: Settings = {"new_decoder_architecture": True, "num_kv_heads": 2}
_T5: Settings = {"d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2, "decoder_start_token_id": 0}

_LINEAR_THEN_FULL: Settings = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA_NET: Settings = _LINEAR_THEN_FULL | {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
_MAMBA2: Settings = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
_MOE: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


# Architectures with states beside, or in place of, keys and values.
HYBRIDS = {"bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm2_vl"}
HYBRIDS |= {"granitemoehybrid_dense", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
# Those with multi-head latent attention, and with an index of the tokens attended to.
LATENTS = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "minicpm3", "youtu"}
INDEXED = {"deepseek_v32", "glm_moe_dsa"}
# Those whose attention is not in the kernels for GPUs: with an index, or in chunks.
PLAIN_ON_GPUS = INDEXED | {"llama4_text"}
# Those whose prompts are computed one by one on GPUs.
ONE_BY_ONE = HYBRIDS | LATENTS


def _rope(kind: str, **settings: Any) -> Settings:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0} | settings}


_LLAMA3 = _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    long_factor=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    original_max_position_embeddings=32,
)

# By name: the `model_type` of its config.json, and what differs there from the smallest model.
ARCHITECTURES: dict[str, tuple[str, Settings]] = {
    "arcee": ("arcee", _GATED),
    "bamba": ("bamba", _GATED | _MAMBA2 | {"attn_layer_indices": [1]}),
    "bart": ("bart", {"decoder_layers": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None}),
    "bloom": ("bloom", {}),
    "bloom_6_heads": ("bloom", {"num_attention_heads": 6, "hidden_size": 96}),
    "code_llama": ("llama", _GATED | _rope("default", rope_theta=1000000.0)),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "cohere": ("cohere", _GATED),
    "cohere_qk_norm": ("cohere", _GATED | {"use_qk_norm": True}),
    "cohere2": ("cohere2", _GATED | _MIXED_WINDOWS),
    "cwm": ("cwm", _GATED | _MIXED_WINDOWS | _ALTERNATING | {"head_dim": 16}),
    "deepseek_v2": ("deepseek_v2", _LATENTS | _LATENT_EXPERTS | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", _LATENTS | _LATENT_EXPERTS),
    "deepseek_v32": ("deepseek_v32", _LATENTS | _LATENT_EXPERTS | _INDEXED),
    "ernie4_5": ("ernie4_5", _GATED | {"head_dim": 16}),
    "exaone4": ("exaone4", _GATED | _MIXED_WINDOWS | {"head_dim": 16}),
    "falcon_7b": ("falcon", {"multi_query": True}),
    "falcon_11b": ("falcon", _FALCON_GROUPED | {"num_ln_in_parallel_attn": 1}),
    "falcon_40b": ("falcon", _FALCON_GROUPED),
    "falcon_rw": (
        "falcon",
        {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
        | {"num_attention_heads": 12, "hidden_size": 192},
    ),
    "falcon_h1": ("falcon_h1", _GATED | _MAMBA2 | {"mamba_d_ssm": 128, "head_dim": 16}),
    "flan_t5": ("t5", _T5 | {"feed_forward_proj": "gated-gelu"}),
    "galactica": ("opt", _OPT | {"activation_function": "gelu", "enable_bias": False}),
    "gemma": ("gemma", _GATED | {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        _GEMMA | _MIXED_WINDOWS | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    ),
    "gemma3_text": ("gemma3_text", _GEMMA | _MIXED_WINDOWS | _ALTERNATING),
    "gemma3n_text": (
        "gemma3n_text",
        _GATED
        | {"head_dim": 16, "num_hidden_layers": 6, "sliding_window": WINDOW, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCAB_SIZE, "laurel_rank": 8}
        | {"activation_sparsity_pattern": [0.5] + 5 * [0.0]},
    ),
    "gemma4_text": ("gemma4_text", _GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4_text_moe": (
        "gemma4_text",
        _GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
    ),
    "glm": ("glm", _GATED | {"head_dim": 16}),
    "glm_moe_dsa": ("glm_moe_dsa", _LATENTS | _LATENT_EXPERTS | _INDEXED | {"indexer_types": ["full", "shared"]}),
    "glm4_moe": ("glm4_moe", _GATED | _LATENT_EXPERTS | {"head_dim": 16}),
    "glm4_moe_lite": ("glm4_moe_lite", _LATENTS | _LATENT_EXPERTS),
    "glm4": ("glm4", _GATED | {"head_dim": 16}),
    "helium": ("helium", _GATED | {"head_dim": 16}),
    "granite": (
        "granite",
        _GATED
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 3.0},
    ),
    "granitemoehybrid": (
        "granitemoehybrid",
        _GATED
        | _MAMBA2
        | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "shared_intermediate_size": 32}
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 3.0},
    ),
    "gpt2": ("gpt2", _TIED),
    "gpt_neo": (
        "gpt_neo",
        {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        _GATED
        | _MAMBA2
        | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32}
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 3.0}
        | {"position_embedding_type": "rope"},
    ),
    "gpt_oss": ("gpt_oss", _GATED | {"num_local_experts": 4, "head_dim": 16, "sliding_window": WINDOW}),
    "gpt_neox": ("gpt_neox", {"intermediate_size": 96}),
    "gpt_neox_serial": ("gpt_neox", {"intermediate_size": 96, "use_parallel_residual": False}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "hyperclovax": (
        "hyperclovax",
        _GATED
        | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 0.3},
    ),
    "jais2": ("jais2", _GATED | {"head_dim": 16}),
    "jamba": (
        "jamba",
        _GATED
        | {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}
        | {"mamba_d_state": 8, "mamba_dt_rank": 8},
    ),
    "kimi_linear": (
        "kimi_linear",
        {"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
        | {"intermediate_size": 96, "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"linear_num_heads": 4, "linear_head_dim": 16}
        | _LINEAR_THEN_FULL,
    ),
    "lfm2": ("lfm2", _GATED | {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "lfm2_moe",
        _GATED | _MOE | {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    ),
    "llama": ("llama", _GATED),
    "llama4_text": (
        "llama4_text",
        _GATED
        | {"num_hidden_layers": 4, "intermediate_size_mlp": 96, "num_local_experts": 2, "head_dim": 16}
        | {"attention_chunk_size": WINDOW, "floor_scale": 8, "attn_scale": 0.5},
    ),
    "llama_dynamic": ("llama", _GATED | _rope("dynamic", factor=2.0) | {"max_position_embeddings": 32}),
    "llama_head_dim_24": ("llama", _GATED | {"head_dim": 24}),
    "llama_linear": ("llama", _GATED | _rope("linear", factor=2.0)),
    "llama3": ("llama", _GATED | _LLAMA3),
    "llama_yarn": ("llama", _GATED | _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mamba": ("mamba", {"state_size": 8}),
    "mellum": (
        "mellum",
        _GATED
        | _MOE
        | _MIXED_WINDOWS
        | _ALTERNATING
        | {"head_dim": 16, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    ),
    # Values with fewer elements than keys, and more KV heads in layers with a window.
    "mimo_v2_flash": (
        "mimo_v2_flash",
        _GATED
        | {"num_hidden_layers": 4, "head_dim": 32, "v_head_dim": 16, "sliding_window": WINDOW}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1},
    ),
    "minicpm3": ("minicpm3", _LATENTS | {"scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32}),
    "minimax_m2": ("minimax_m2", _GATED | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ministral": ("ministral", _GATED | {"head_dim": 16, "sliding_window": WINDOW}),
    "mistral": ("mistral", _GATED | {"sliding_window": WINDOW}),
    "mixtral": ("mixtral", _GATED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mpt": ("mpt", {"max_seq_len": 256}),
    "mpt_6_heads": ("mpt", {"num_attention_heads": 6, "hidden_size": 96, "attn_config": {"clip_qkv": 2.0}}),
    "nemotron": ("nemotron", _GATED | {"head_dim": 32}),
    "nemotron_h": (
        "nemotron_h",
        _GATED
        | {"layers_block_type": ["mamba", "attention", "moe", "mlp"], "num_hidden_layers": 4, "head_dim": 16}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "chunk_size": 16}
        | {"n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
    ),
    "olmo2": ("olmo2", _GATED),
    "olmo3": ("olmo3", _GATED | _MIXED_WINDOWS),
    "olmoe": ("olmoe", _GATED | {"num_experts": 4, "num_experts_per_tok": 2}),
    # As many features of keys as of values: `transformers` saves their convolutions as three of equal size.
    "olmo_hybrid": ("olmo_hybrid", _GATED | _DELTA_NET | {"linear_key_head_dim": 48}),
    "opt": ("opt", _OPT | _TIED),
    "opt_350m": ("opt", _OPT | {"word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "persimmon": ("persimmon", {"intermediate_size": 96}),
    "phi": ("phi", {"intermediate_size": 96}),
    "phi_norms": ("phi", {"intermediate_size": 96, "qk_layernorm": True, "num_key_value_heads": 2}),
    "phi3": ("phi3", _GATED | {"sliding_window": WINDOW}),
    "phi3_longrope": ("phi3", _GATED | _LONGROPE | {"original_max_position_embeddings": 32}),
    "qwen2": ("qwen2", _GATED),
    "qwen2_moe": ("qwen2_moe", _GATED | _MOE | {"shared_expert_intermediate_size": 32}),
    "qwen2_windows": ("qwen2", _GATED | _MIXED_WINDOWS | {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3": ("qwen3", _GATED | {"head_dim": 32}),
    "qwen3_moe": (
        "qwen3_moe",
        _GATED | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "rwkv": ("rwkv", {"attention_hidden_size": 64}),
    "qwen3_next": (
        "qwen3_next",
        _GATED | _DELTA_NET | _MOE | {"head_dim": 16, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5_text": ("qwen3_5_text", _GATED | _DELTA_NET | {"head_dim": 16}),
    "qwen3_5_moe_text": (
        "qwen3_5_moe_text",
        _GATED | _DELTA_NET | _MOE | {"head_dim": 16, "shared_expert_intermediate_size": 32},
    ),
    "santacoder": ("gpt_bigcode", {"multi_query": True}),
    "gpt_bigcode_multi_head": ("gpt_bigcode", {"multi_query": False}),
    "seed_oss": ("seed_oss", _GATED | {"head_dim": 16}),
    "stablelm": ("stablelm", _GATED),
    "stablelm_parallel": ("stablelm", _GATED | {"use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder": ("gpt_bigcode", {"multi_query": True, "num_attention_heads": 34, "hidden_size": 544}),
    "smollm3": ("smollm3", _GATED | {"no_rope_layers": [1, 0]}),
    "youtu": ("youtu", _LATENTS),
    "starcoder2": ("starcoder2", _GATED | {"sliding_window": WINDOW}),
    "t5": ("t5", _T5 | _TIED),
    "vaultgemma": ("vaultgemma", _GEMMA | _MIXED_WINDOWS | {"final_logit_softcapping": 10.0}),
}


# By `model_type`: the `model_type` of the text model, and settings of the part that reads images.
def _mrope(section: list[int], **settings: Any) -> Settings:
    """Rotary positions of time, height and width, for which each text has three times its position."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section} | settings}


_QWEN3_VISION: Settings = {"out_hidden_size": 64, "depth": 1, "num_heads": 2, "deepstack_visual_indexes": [0]}
# Models that read images, too: what the text model is like, what it has beside that, and the part for images.
_WITH_IMAGES: dict[str, tuple[str, Settings, Settings]] = {
    "gemma3": ("gemma3_text", {}, {"image_size": 28}),
    "gemma4": ("gemma4_text", {}, {"head_dim": 16}),
    "glm4v": ("glm4", _mrope([2, 1, 1], partial_rotary_factor=0.5), {}),
    "idefics3": ("llama", {}, {"image_size": 28}),
    "internvl": ("qwen2", {}, {"image_size": [28, 28], "patch_size": [14, 14]}),
    "lfm2_vl": ("lfm2", {}, {}),
    "llama4": ("llama4_text", {}, {"image_size": 28, "vision_output_dim": 32, "projector_input_dim": 32}),
    "llava": ("llama", {}, {"image_size": 28}),
    "llava_next": ("mistral", {}, {"image_size": 28}),
    "mistral3": ("mistral", {}, {"image_size": 28}),
    "qwen2_5_vl": ("qwen2", _mrope([2, 3, 3]), {"out_hidden_size": 64}),
    "qwen2_vl": ("qwen2", _mrope([2, 3, 3]), {"embed_dim": 32, "depth": 1, "num_heads": 2}),
    "qwen3_vl": (
        "qwen3",
        _mrope([2, 3, 3]),
        {"out_hidden_size": 64, "depth": 1, "num_heads": 2, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ("qwen3_5_text", _mrope([1, 1, 0], partial_rotary_factor=0.25), _QWEN3_VISION),
    "qwen3_5_moe": ("qwen3_5_moe_text", _mrope([1, 1, 0], partial_rotary_factor=0.25), _QWEN3_VISION),
    "qwen3_vl_moe": ("qwen3_moe", _mrope([2, 3, 3]), _QWEN3_VISION),
    "smolvlm": ("llama", {}, {"image_size": 28}),
}
WITH_IMAGES = sorted(_WITH_IMAGES)


def make(architecture: str, folder: Path, **overrides: Any) -> Path:
    """Saves a model of the architecture in a folder and returns it. overrides: settings of its config.json."""
    build(architecture, **overrides).save_pretrained(folder)
    return folder


def make_with_images(
    model_type: str,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    text_settings: Settings | None = None,
    vision_settings: Settings | None = None,
    settings: Settings | None = None,
) -> Path:
    """Saves a model that reads images, too, and returns its folder. Its config.json is like those of the hub: what the
    text model is stands in `text_config`, the dtype beside it. settings: others than those of the tiny one.
    """
    like, differing, further = _WITH_IMAGES[model_type]
    text = configuration(like).to_dict() | differing | (text_settings or {})
    own: Any = type(AutoConfig.for_model(model_type)).sub_configs["text_config"]
    if own is not AutoConfig:
        text["model_type"] = own.model_type
    vision = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"patch_size": 14, "projector_output_dim": 32} | further | (vision_settings or {})
    config = AutoConfig.for_model(
        model_type, text_config=text, vision_config=vision, **{"tie_word_embeddings": False} | (settings or {})
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        _scale_up(model)
    model.save_pretrained(folder)
    file = folder / "config.json"
    saved = json.loads(file.read_text())
    for part in ("text_config", "vision_config"):
        saved[part].pop("dtype", None)
    file.write_text(json.dumps(saved | {"dtype": str(dtype).removeprefix("torch.")}))
    return folder


def make_gemma3n(folder: Path) -> Path:
    """Saves a Gemma 3n in the form of the hub, which also reads images, and returns its folder.

    Its text model is that of `make("gemma3n_text", ...)`; `transformers` builds the rest with timm alone.
    """
    make("gemma3n_text", folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in load_file(file).items()}
    save_file(tensors | {"model.vision_tower.weight": torch.zeros(2, 2)}, file, metadata={"format": "pt"})
    text = json.loads(config.read_text())
    config.write_text(json.dumps({"model_type": "gemma3n", "text_config": text, "dtype": "float32"}))
    return folder


def configuration(architecture: str, **overrides: Any) -> PretrainedConfig:
    """The configuration of a model of the architecture. overrides: settings that are not those of the tiny one."""
    model_type, settings = ARCHITECTURES[architecture]
    return AutoConfig.for_model(model_type, **_SMALL | settings | overrides)


def build(architecture: str, **overrides: Any) -> PreTrainedModel:
    """A model of the architecture in float32, the same at every call."""
    config = configuration(architecture, **overrides)
    factory = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = factory.from_config(config)
        _scale_up(model)
    return model.eval()


@torch.no_grad()
def _scale_up(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(SCALE)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):  # of Gemma 4
            buffer.fill_(0.75)


def make_llama(folder: Path, **overrides: Any) -> Path:
    """Saves a Llama of 0.1 million parameters, the same at every call. overrides: settings of its config.json."""
    settings: dict[str, Any] = {
        "vocab_size": TOKENIZER_VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**settings | overrides))
    model.save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def make_tokenizer() -> Tokenizer:
    """Byte-level, so that it takes any text; puts a BOS token in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog, and then it rests in the shade of an old oak"],
        trainers.BpeTrainer(
            vocab_size=TOKENIZER_VOCAB_SIZE,
            special_tokens=["<pad>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer
