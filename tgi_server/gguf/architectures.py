"""Architectures of GGUF files: the configuration and the names of tensors that `transformers` has for each."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tgi_server.gguf import changes, configuration, hybrids, tensor_names
from tgi_server.gguf.changes import Change
from tgi_server.gguf.configuration import Config
from tgi_server.gguf.file import Gguf
from tgi_server.gguf.metadata import Metadata, dtype_of
from tgi_server.gguf.paths import GgufError

# Tensors that are part of the configuration.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The model of `transformers` that corresponds to an architecture of llama.cpp.

    names, of_model: names of tensors in layers and of other tensors, in addition to those of most architectures.
    norm_offset: what files have added to the weights of norms. config: settings in addition to those of all
    architectures. stacked_experts: the weights of a layer's experts are one tensor in `transformers`, too, with gate
    and up interleaved, as in gpt-oss. changes: how a tensor differs, by a configuration of `transformers` and its name
    in a layer. beside: tensors that are read together with others. float_experts: names of the tensors of all experts,
    if no kernels read their types. layers: path of the list of layers. alike: other model types with this architecture.
    """

    model_type: str
    class_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    of_model: Mapping[str, str] = field(default_factory=dict)
    norm_offset: float = 0.0
    config: Callable[[Metadata], Config] = lambda _: {}
    stacked_experts: bool = False
    changes: Callable[[Config, str], Change] = changes.none
    beside: Collection[str] = ()
    float_experts: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    alike: Collection[str] = ()

    def name_in_model(self, name: str) -> str | None:
        """Returns a tensor's name in `transformers`, or None. For a tensor of all experts it has {} for the number."""
        stem, _, kind = name.rpartition(".")
        if stem in (of_model := {**tensor_names.MODEL, **self.of_model}):
            return f"{of_model[stem]}.{kind}"
        known = {**tensor_names.LAYER, **self.names}
        block = _BLOCK.fullmatch(name)
        if block is None or block[2] not in known:
            block = _BLOCK.fullmatch(stem)
        if block is None or block[2] not in known:
            return None
        own = known[block[2]]
        if own.endswith("!"):  # a parameter that is not of a module has no kind
            return f"{self.layers}.{block[1]}.{own[:-1]}"
        return f"{self.layers}.{block[1]}.{own}.{kind if kind == 'bias' else 'weight'}"


def layer_of(name: str) -> int | None:
    """Returns the number of the layer that a tensor belongs to; None for those of no layer."""
    block = _BLOCK.fullmatch(name)
    return None if block is None else int(block[1])


def part_of(name: str) -> str:
    """Returns the name of a tensor without its layer's name and without `weight` or `bias`."""
    block = _BLOCK.fullmatch(name)
    return (block[2] if block else name).removesuffix(".weight").removesuffix(".bias")


def architecture_of(file: Gguf) -> Architecture:
    """Returns the architecture of a file. Raises GgufError for one that is not served."""
    if file.is_adapter:
        raise GgufError(
            f"{file.path} is an adapter, not a model; serve its base model with --lora-adapters NAME={file.path}"
        )
    name = file.architecture
    if name == "llama" and file.metadata.get("llama.expert_count"):
        name = "mixtral"
    found = ARCHITECTURES.get(name)
    if found is None:
        known = ", ".join(sorted(architecture for architecture in ARCHITECTURES if architecture != "mixtral"))
        raise GgufError(
            f"{file.path}: general.architecture is {file.architecture!r}, which is not served from GGUF files; take "
            f"the model in transformers format. Those that are served: {known}"
        )
    return found


def tensor_headers(file: Gguf) -> dict[str, dict[str, Any]]:
    """Returns dtype, shape and data_offsets of each tensor, as safetensors has them, by its name in `transformers`.

    Raises GgufError.
    """
    place = architecture_of(file).name_in_model
    return {
        place(name) or name: {"dtype": each.kind.name, "shape": list(each.shape), "data_offsets": [0, each.raw.size]}
        for name, each in file.tensors.items()
    }


def config_of(file: Gguf) -> Config:
    """Returns the content of config.json for a file. Raises GgufError."""
    try:
        return _config_of(file, architecture_of(file))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of numbers that no model has
        if isinstance(error, GgufError):
            raise
        raise GgufError(
            f"{file.path}: the metadata of {file.architecture} do not describe a model "
            f"({type(error).__name__}: {error}); download the file again"
        ) from error


def _config_of(file: Gguf, kind: Architecture) -> Config:
    given = Metadata(file)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise GgufError(f"{file.path} has no tensor token_embd.weight; is it the file of a language model?")
    heads = given.number("attention.head_count")
    config: Config = {
        "model_type": kind.model_type,
        "architectures": [kind.class_name],
        "dtype": dtype_of(file),
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
        token_id = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{name}_token_id"] = token_id if token_id in range(embedding.shape[0]) else None
    config |= kind.config(given)
    if "rope_parameters" not in config:
        config["rope_parameters"] = configuration.rope(given)
    configuration.check_whole_rotation(given, config)
    return {name: value for name, value in config.items() if name != "rope_parameters" or value is not None}


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", changes=changes.interleaved, config=configuration.llama, alike=("mistral",)
    ),
    "mixtral": Architecture(
        "mixtral",
        "MixtralForCausalLM",
        tensor_names.MIXTRAL_EXPERTS,
        changes=changes.interleaved,
        config=configuration.mixtral,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        tensor_names.SHARED_EXPERT,
        config=configuration.qwen_moe,
    ),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", tensor_names.QWEN_EXPERTS, config=configuration.qwen_moe
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        tensor_names.SHARED_EXPERT | tensor_names.DELTA_RULE_QKVZ,
        norm_offset=1.0,
        config=hybrids.qwen_linear_moe,
        changes=changes.qwen3_next,
        beside=("attn_gate",),
    ),
    "qwen35": Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        tensor_names.DELTA_RULE,
        norm_offset=1.0,
        config=hybrids.linear_attention,
        changes=changes.delta_rule,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        tensor_names.SHARED_EXPERT | tensor_names.DELTA_RULE,
        norm_offset=1.0,
        config=hybrids.qwen_linear_moe,
        changes=changes.delta_rule,
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        tensor_names.LFM2,
        tensor_names.LFM2_OF_MODEL,
        config=hybrids.lfm2,
        changes=changes.short_convolution,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        tensor_names.LFM2,
        tensor_names.LFM2_OF_MODEL,
        config=hybrids.lfm2_moe,
        changes=changes.short_convolution,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        tensor_names.FALCON_H1,
        tensor_names.FINAL_LAYERNORM,
        config=hybrids.falcon_h1,
        changes=changes.mamba2,
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        tensor_names.GRANITE_HYBRID,
        config=hybrids.granite_hybrid,
        changes=changes.granite_hybrid,
        beside=("ffn_up", "ffn_up_shexp"),
        float_experts=tensor_names.GRANITE_FLOAT_EXPERTS,
    ),
    "jamba": Architecture(
        "jamba",
        "JambaForCausalLM",
        tensor_names.JAMBA,
        tensor_names.FINAL_LAYERNORM,
        config=hybrids.jamba,
        changes=changes.mamba1,
    ),
    "mamba": Architecture(
        "mamba",
        "MambaForCausalLM",
        tensor_names.MAMBA1,
        tensor_names.MAMBA1_OF_MODEL,
        config=hybrids.mamba,
        changes=changes.mamba1,
        layers="backbone.layers",
    ),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Architecture(
            "nemotron_h",
            "NemotronHForCausalLM",
            tensor_names.NEMOTRON_H,
            tensor_names.NEMOTRON_H_OF_MODEL,
            config=hybrids.nemotron_h,
            changes=changes.nemotron_h,
        ),
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0, config=configuration.gemma),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", tensor_names.FOUR_NORMS, norm_offset=1.0, config=configuration.gemma2
    ),
    "gemma3": Architecture(
        "gemma3_text", "Gemma3ForCausalLM", tensor_names.FOUR_NORMS, norm_offset=1.0, config=configuration.gemma3
    ),
    "gemma3n": Architecture(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        tensor_names.GEMMA3N,
        tensor_names.GEMMA3N_OF_MODEL,
        config=configuration.gemma3n,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        "Gemma4ForCausalLM",
        tensor_names.GEMMA4,
        tensor_names.GEMMA4_OF_MODEL,
        config=configuration.gemma4,
    ),
    "phi3": Architecture(
        "phi3",
        "Phi3ForCausalLM",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        config=configuration.phi3,
    ),
    "granite": Architecture("granite", "GraniteForCausalLM", changes=changes.interleaved, config=configuration.granite),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", changes=changes.interleaved, config=configuration.smollm3),
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
    "bert": Architecture(
        "bert",
        "BertModel",
        tensor_names.BERT,
        tensor_names.BERT_OF_MODEL,
        config=configuration.bert,
        layers="encoder.layer",
    ),
    "nomic-bert": Architecture(
        "nomic_bert",
        "NomicBertModel",
        tensor_names.NOMIC_BERT,
        tensor_names.BERT_OF_MODEL,
        config=configuration.nomic_bert,
        layers="layers",
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
