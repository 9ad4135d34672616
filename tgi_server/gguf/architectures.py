"""Architectures of GGUF files: the configuration and the names of tensors that `transformers` has for each."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType

from tgi_server.gguf.file import Gguf, GgufError

# The names in `transformers` by those in files. {} stands for the number of the layer.
_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# With a norm before and behind each part of a layer.
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# {} stands for the number of the expert.
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
# Tensors that are part of the configuration.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")

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
        return int(own or self.number("embedding_length") // self.number("attention.head_count"))


@dataclass(frozen=True, slots=True)
class Architecture:
    """The model of `transformers` that an architecture of llama.cpp is.

    names: of tensors in layers, beside those that most architectures have. interleaved: the rows of query and key
    projections are in the order of llama.cpp's rotary embedding, neighbours turning each other. norm_offset: what
    files have added to the weights of norms. config: settings beside those of all. stacked_experts: the weights of a
    layer's experts are one tensor in `transformers`, too, with gate and up interleaved, as in gpt-oss.
    """

    model_type: str
    class_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    config: Callable[[Metadata], Config] = lambda _: {}
    stacked_experts: bool = False

    def place(self, name: str) -> str | None:
        """Returns the name in `transformers` of a tensor; of all experts with {} for the number of one; or None."""
        stem, _, kind = name.rpartition(".")
        if stem in _MODEL:
            return f"{_MODEL[stem]}.{kind}"
        block = _BLOCK.fullmatch(stem)
        known = {**_LAYER, **self.names}
        if block is None or block[2] not in known:
            return None
        own = known[block[2]]
        # A parameter that is not of a module has no kind.
        return f"model.layers.{block[1]}.{own[:-1] if own.endswith('!') else f'{own}.{kind}'}"


def architecture_of(file: Gguf) -> Architecture:
    """Returns the architecture of a file. Raises GgufError for one that is not served."""
    name = file.architecture
    if name == "llama" and file.metadata.get("llama.expert_count"):
        name = "mixtral"
    found = ARCHITECTURES.get(name)
    if found is None:
        known = ", ".join(sorted(each for each in ARCHITECTURES if each != "mixtral"))
        raise GgufError(
            f"{file.path}: general.architecture is {file.architecture!r}, which is not served from GGUF files; take "
            f"the model in transformers format. Those that are served: {known}"
        )
    return found


def config_of(file: Gguf) -> Config:
    """Returns the content of config.json for a file. Raises GgufError."""
    kind, given = architecture_of(file), Metadata(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(f"{file.path} has no tensor token_embd.weight; is it the file of a language model?")
    heads = given.number("attention.head_count")
    config: Config = {
        "model_type": kind.model_type,
        "architectures": [kind.class_name],
        "dtype": _dtype(file),
        "vocab_size": embedding.shape[0],
        "hidden_size": given.number("embedding_length"),
        "num_hidden_layers": given.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": given.number("attention.head_count_kv", heads),
        "head_dim": given.head_dim,
        "max_position_embeddings": given.number("context_length"),
        "tie_word_embeddings": not given.has("output.weight"),
        "rope_parameters": _rope(given),
        "sliding_window": None,
        "attention_bias": given.has("blk.0.attn_q.bias"),
    }
    if given.get("feed_forward_length"):
        config["intermediate_size"] = given.number("feed_forward_length")
    if (eps := given.get("attention.layer_norm_rms_epsilon")) is not None:
        config["rms_norm_eps"] = eps
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return config | kind.config(given)


def _dtype(file: Gguf) -> str:
    """Returns the dtype to compute in: that of the weights where they are not quantised, else bfloat16."""
    kinds = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _rope(given: Metadata) -> Config:
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


def _partial_rope(given: Metadata) -> Config:
    size = given.number("rope.dimension_count", given.head_dim)
    share = size / given.head_dim
    return {"rope_parameters": {**_rope(given), "partial_rotary_factor": share}, "partial_rotary_factor": share}


def _llama(given: Metadata) -> Config:
    return {"mlp_bias": given.has("blk.0.ffn_gate.bias")}


def _mixtral(given: Metadata) -> Config:
    used = given.number("expert_used_count")
    return {"num_local_experts": given.number("expert_count"), "num_experts_per_tok": used}


def _qwen_moe(given: Metadata) -> Config:
    shared = given.get("expert_shared_feed_forward_length")
    own = {
        "num_experts": given.number("expert_count"),
        "num_experts_per_tok": given.number("expert_used_count"),
        "moe_intermediate_size": given.number("expert_feed_forward_length"),
        "norm_topk_prob": given.file.architecture == "qwen3moe",
    }
    return own | ({"shared_expert_intermediate_size": shared} if shared else {})


def _gemma(given: Metadata) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _gemma2(given: Metadata) -> Config:
    # The model of 27B parameters divides by the width of a head as if all heads together were as wide as the model.
    large = given.number("block_count") == 46
    scalar = given.number("embedding_length") // given.number("attention.head_count") if large else given.head_dim
    return _gemma(given) | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": given.number("attention.sliding_window"),
        "attn_logit_softcapping": given.get("attn_logit_softcapping"),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
    }


def _gemma3(given: Metadata) -> Config:
    large = given.number("block_count") == 62
    scalar = given.number("embedding_length") // given.number("attention.head_count") if large else given.head_dim
    local = given.number("rope.freq_base_swa", 10_000.0)
    return _gemma(given) | {
        "query_pre_attn_scalar": scalar,
        "sliding_window": given.number("attention.sliding_window"),
        "final_logit_softcapping": given.get("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": {"rope_theta": 1_000_000.0} | _rope(given),
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _phi3(given: Metadata) -> Config:
    window = given.get("attention.sliding_window")
    original = given.get("rope.scaling.original_context_length") or given.number("context_length")
    return _partial_rope(given) | {"sliding_window": window or None, "original_max_position_embeddings": original}


def _granite(given: Metadata) -> Config:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    # What a file leaves out has no effect.
    plain = {"attention_multiplier": given.head_dim**-0.5}
    return {name: given.get(key, plain.get(name, 1.0)) for name, key in names.items()} | _llama(given)


def _smollm3(given: Metadata) -> Config:
    return {"no_rope_layer_interval": 4, "use_sliding_window": False, "mlp_bias": given.has("blk.0.ffn_gate.bias")}


def _gpt_oss(given: Metadata) -> Config:
    return _mixtral(given) | {
        "intermediate_size": given.number("expert_feed_forward_length"),
        "sliding_window": given.number("attention.sliding_window"),
        "rope_parameters": {**_rope(given), "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    }


def _starcoder2(given: Metadata) -> Config:
    biases = given.has("blk.0.attn_q.bias")
    return {"norm_epsilon": given.number("attention.layer_norm_epsilon"), "use_bias": biases}


def _cohere(given: Metadata) -> Config:
    eps = given.number("attention.layer_norm_epsilon")
    return {
        "layer_norm_eps": eps,
        "logit_scale": given.number("logit_scale"),
        "use_qk_norm": given.has("blk.0.attn_q_norm.weight"),
    }


def _sharing(names: Mapping[str, str], other: Sequence[str] = ()) -> Mapping[str, str]:
    return {**names, **{f"{each}_shexp": f"mlp.shared_expert.{each.removeprefix('ffn_')}_proj" for each in other}}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved=True, config=_llama),
    "mixtral": Architecture("mixtral", "MixtralForCausalLM", _MIXTRAL_EXPERTS, interleaved=True, config=_mixtral),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            **_sharing(_QWEN_EXPERTS, ("ffn_gate", "ffn_up", "ffn_down")),
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        },
        config=_qwen_moe,
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN_EXPERTS, config=_qwen_moe),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0, config=_gemma),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _FOUR_NORMS, norm_offset=1.0, config=_gemma2),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _FOUR_NORMS, norm_offset=1.0, config=_gemma3),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        config=_phi3,
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", interleaved=True, config=_granite),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", interleaved=True, config=_smollm3),
    "gpt-oss": Architecture(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            "attn_sinks": "self_attn.sinks!",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_gate_inp": "mlp.router",
            "ffn_gate_exps": "mlp.experts.gate_up_proj",
            "ffn_up_exps": "mlp.experts.gate_up_proj",
            "ffn_down_exps": "mlp.experts.down_proj",
        },
        config=_gpt_oss,
        stacked_experts=True,
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        config=_starcoder2,
    ),
    "command-r": Architecture("cohere", "CohereForCausalLM", config=_cohere),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        config=_partial_rope,
    ),
}
