"""Architectures of GGUF files: the configuration and the names of tensors that `transformers` has for each."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tgi_server.gguf import configuration
from tgi_server.gguf.configuration import Config, Metadata
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


Order = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between a file's tensor and that of `transformers`.

    rows, columns: for each row or input there, which one of the file's it is; None: the same one. of_numbers: makes
    numbers in float32 of those of the file. shape: makes the shape of that of the file. beside: the name of a tensor
    whose rows follow those of this one before they are ordered.
    """

    rows: Order | None = None
    columns: Order | None = None
    of_numbers: Callable[[Any], Any] | None = None
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    beside: str | None = None


_SAME = Change()


@dataclass(frozen=True, slots=True)
class Architecture:
    """The model of `transformers` that an architecture of llama.cpp is.

    names, of_model: of tensors in layers and of others, beside those that most architectures have. interleaved: the
    rows of query and key projections are in the order of llama.cpp's rotary embedding, neighbours turning each other.
    norm_offset: what files have added to the weights of norms. config: settings beside those of all. stacked_experts:
    the weights of a layer's experts are one tensor in `transformers`, too, with gate and up interleaved, as in gpt-oss.
    changes: how a tensor differs, by its name in a layer.
    """

    model_type: str
    class_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    of_model: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False
    norm_offset: float = 0.0
    config: Callable[[Metadata], Config] = lambda _: {}
    stacked_experts: bool = False
    changes: Callable[[Metadata, str], Change] = lambda *_: _SAME

    @property
    def joins_gate(self) -> bool:
        """Returns True if the tensors attn_qkv and attn_gate are one in `transformers`."""
        return "attn_qkv" in self.names and "attn_gate" not in self.names

    def place(self, name: str) -> str | None:
        """Returns the name in `transformers` of a tensor; of all experts with {} for the number of one; or None."""
        stem, _, kind = name.rpartition(".")
        if stem in (of_model := {**_MODEL, **self.of_model}):
            return f"{of_model[stem]}.{kind}"
        known = {**_LAYER, **self.names}
        block = _BLOCK.fullmatch(name)
        if block is None or block[2] not in known:
            block = _BLOCK.fullmatch(stem)
        if block is None or block[2] not in known:
            return None
        own = known[block[2]]
        # A parameter that is not of a module has no kind.
        return f"model.layers.{block[1]}.{own[:-1] if own.endswith('!') else f'{own}.{kind}'}"


def layer_of(name: str) -> int | None:
    """Returns the number of the layer that a tensor belongs to; None for those of no layer."""
    block = _BLOCK.fullmatch(name)
    return None if block is None else int(block[1])


def part_of(name: str) -> str:
    """Returns the name of a tensor without that of its layer and without `weight` or `bias`."""
    block = _BLOCK.fullmatch(name)
    return (block[2] if block else name).removesuffix(".weight").removesuffix(".bias")


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
        "dtype": configuration.dtype_of(file),
        "vocab_size": embedding.shape[0],
        "hidden_size": given.number("embedding_length"),
        "num_hidden_layers": given.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": given.most("attention.head_count_kv", heads),
        "head_dim": given.head_dim,
        "max_position_embeddings": given.number("context_length"),
        "tie_word_embeddings": not given.has("output.weight"),
        "sliding_window": None,
        "attention_bias": given.has("blk.0.attn_q.bias"),
    }
    if given.get("feed_forward_length"):
        config["intermediate_size"] = given.least("feed_forward_length")
    if (eps := given.get("attention.layer_norm_rms_epsilon")) is not None:
        config["rms_norm_eps"] = eps
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    config |= kind.config(given)
    return config if "rope_parameters" in config else config | {"rope_parameters": configuration.rope(given)}


def _sharing(names: Mapping[str, str], other: Sequence[str] = ()) -> Mapping[str, str]:
    return {**names, **{f"{each}_shexp": f"mlp.shared_expert.{each.removeprefix('ffn_')}_proj" for each in other}}


def _by_value_head(given: Metadata, size: int, *, before: int = 0) -> Order | None:
    """Returns the order of rows or inputs that belong to the value heads of a delta rule, `size` for each head.

    Files have the first value head of each key head first, then the second ones, and so on. before: rows that stand
    before those, in order.
    """
    keys, values = given.number("ssm.group_count"), given.number("ssm.time_step_rank")
    if keys == values:
        return None
    order = np.arange(values * size).reshape(values // keys, keys, size).swapaxes(0, 1).ravel()
    return np.concatenate([np.arange(before), before + order])


def _delta_rule(given: Metadata, part: str, *, ordered: bool) -> Change:
    """Returns how tensors of a gated delta rule differ. ordered: those of value heads are in another order."""
    value_size = given.number("ssm.inner_size") // given.number("ssm.time_step_rank")
    queries_and_keys = 2 * given.number("ssm.state_size") * given.number("ssm.group_count")

    def order(size: int, before: int = 0) -> Order | None:
        return _by_value_head(given, size, before=before) if ordered else None

    match part:
        case "ssm_a":
            return Change(order(1), of_numbers=lambda numbers: np.log(-numbers))
        case "ssm_dt" | "ssm_alpha" | "ssm_beta":
            return Change(order(1))
        case "ssm_conv1d":
            return Change(order(value_size, queries_and_keys), shape=_with_channel)
        case "attn_qkv":
            return Change(order(value_size, queries_and_keys))
        case "attn_gate":
            return Change(order(value_size))
        case "ssm_out":
            return Change(columns=order(value_size))
    return _SAME


def _qwen3_next(given: Metadata, part: str) -> Change:
    if part != "attn_qkv":
        return _delta_rule(given, part, ordered=False)
    # Of each key head: its query, its key, its values and what gates these.
    heads, size = given.number("ssm.group_count"), given.number("ssm.state_size")
    values = given.number("ssm.inner_size")
    starts = np.cumsum([0, heads * size, heads * size, values, values])
    parts = [np.arange(first, last).reshape(heads, -1) for first, last in pairwise(starts)]
    return Change(np.concatenate(parts, 1).ravel(), beside="attn_gate")


def _with_channel(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a convolution of each channel by itself: [channels, 1, width]."""
    return (shape[0], 1, shape[1])


_DELTA_RULE = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log!",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias!",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_DELTA_RULE_QKVZ = {
    **{name: own for name, own in _DELTA_RULE.items() if name != "attn_gate"},
    "attn_qkv": "linear_attn.in_proj_qkvz",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b": "feed_forward.expert_bias!",
}
_LFM2_OF_MODEL = dict.fromkeys(("output_norm", "token_embd_norm"), "model.embedding_norm")
_GEMMA4 = _FOUR_NORMS | {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar!",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale!",
    "ffn_gate_up_exps": "experts.gate_up_proj!",
    "ffn_down_exps": "experts.down_proj!",
    "ffn_down_exps.scale": "router.per_expert_scale!",
}
_GEMMA4_OF_MODEL = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_SHARED_EXPERT = {
    **_sharing(_QWEN_EXPERTS, ("ffn_gate", "ffn_up", "ffn_down")),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


def _short_convolution(_: Metadata, part: str) -> Change:
    return Change(shape=_with_channel) if part == "shortconv.conv" else _SAME


_tiled_delta_rule = partial(_delta_rule, ordered=True)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved=True, config=configuration.llama),
    "mixtral": Architecture(
        "mixtral", "MixtralForCausalLM", _MIXTRAL_EXPERTS, interleaved=True, config=configuration.mixtral
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _SHARED_EXPERT,
        config=configuration.qwen_moe,
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _QWEN_EXPERTS, config=configuration.qwen_moe),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _SHARED_EXPERT | _DELTA_RULE_QKVZ,
        norm_offset=1.0,
        config=configuration.qwen_linear_moe,
        changes=_qwen3_next,
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _DELTA_RULE,
        norm_offset=1.0,
        config=configuration.linear_attention,
        changes=_tiled_delta_rule,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _SHARED_EXPERT | _DELTA_RULE,
        norm_offset=1.0,
        config=configuration.qwen_linear_moe,
        changes=_tiled_delta_rule,
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        _LFM2,
        _LFM2_OF_MODEL,
        config=configuration.lfm2,
        changes=_short_convolution,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _LFM2,
        _LFM2_OF_MODEL,
        config=configuration.lfm2_moe,
        changes=_short_convolution,
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0, config=configuration.gemma),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _FOUR_NORMS, norm_offset=1.0, config=configuration.gemma2),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", _FOUR_NORMS, norm_offset=1.0, config=configuration.gemma3
    ),
    "gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM", _GEMMA4, _GEMMA4_OF_MODEL, config=configuration.gemma4),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        config=configuration.phi3,
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", interleaved=True, config=configuration.granite),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", interleaved=True, config=configuration.smollm3),
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
        config=configuration.gpt_oss,
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
        config=configuration.starcoder2,
    ),
    "command-r": Architecture("cohere", "CohereForCausalLM", config=configuration.cohere),
    "glm4": Architecture(
        "glm4",
        "Glm4ForCausalLM",
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        config=configuration.partial_rope,
    ),
}
