"""Tiny models as GGUF files, beside folders in transformers format with the same numbers.

    file, dense = make_gguf(make("llama", tmp_path / "plain"), tmp_path, "Q4_K")

Matrices are rounded by the package `gguf`, or, of types that it only reads, are blocks of random bytes.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.tiny_models import make

# Widths that whole blocks of all types fit in.
WIDE: Mapping[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
# By type: the first bytes of the float16 numbers in a block.
HALVES: Mapping[str, tuple[int, ...]] = {
    "IQ2_XS": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q8_0": (0,),
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_ARCHITECTURES = {"gemma2": _GEMMA, "mixtral": {}, "llama": {}, "qwen2": {}, "qwen3": {}}
Kinds = str | Callable[[str], str]


def make_gguf(model: Path, folder: Path, kinds: Kinds = "F32", **metadata: Any) -> tuple[Path, Path]:
    """Writes a model of `transformers` as a GGUF file, and another folder with its numbers as that file has them.

    kinds: the type of all matrices, or a function that returns it for a name in the file. metadata: further entries,
    with `__` for a dot; None leaves one out. Returns the file and the folder.
    """
    config = json.loads((model / "config.json").read_text())
    kind_of = kinds if callable(kinds) else lambda _: kinds
    file, dense = folder / f"{model.name}.gguf", folder / f"{model.name}-dense"
    dense.mkdir(parents=True)
    for part in model.glob("*.json"):
        (dense / part.name).write_text(part.read_text())
    numbers: dict[str, torch.Tensor] = {}
    architecture = "llama" if config["model_type"] == "mixtral" else config["model_type"]
    writer = GGUFWriter(file, architecture)
    has_tokenizer = (model / "tokenizer.json").is_file()
    tokens = tokenizer_entries(model) if has_tokenizer else words(config["vocab_size"])
    entries = _metadata(architecture, config) | tokens
    add_metadata(writer, entries | {key.replace("__", "."): value for key, value in metadata.items()})
    for name, parts in _tensors(config, load_file(model / "model.safetensors")).items():
        stored, read = [], []
        for original, tensor, rows in parts:
            array = np.ascontiguousarray(tensor.float().numpy())
            kind = kind_of(name) if tensor.dim() > 1 else "F32"
            raw = _raw(array[rows] if rows is not None else array, kind)
            stored.append(raw)
            back = gguf.dequantize(raw, GGMLQuantizationType[kind]).reshape(array.shape)
            numbers[original] = torch.from_numpy(back if rows is None else back[np.argsort(rows)]).contiguous()
            read.append(kind)
        data = np.stack(stored) if "_exps." in name else stored[0]
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[read[0]])
    _without_offsets(config, numbers)
    save_file(numbers, dense / "model.safetensors", metadata={"format": "pt"})
    finish(writer)
    return file, dense


def make_wide(architecture: str, folder: Path, kinds: Kinds = "F32", **settings: Any) -> tuple[Path, Path]:
    """Returns a GGUF file and a folder of a model that is wide enough for all types."""
    model = make(architecture, folder / architecture, **{**WIDE, **settings})
    return make_gguf(model, folder, kinds)


def random_blocks(kind: str, rows: int, inputs: int, deviation: float = 0.01) -> np.ndarray:
    """Returns rows of blocks with random codes and scales."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    numbers = np.random.default_rng(rows + inputs)
    raw = numbers.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
    for first in HALVES[kind]:
        scales = deviation * numbers.uniform(0.5, 1.0, (rows, inputs // block, 1))
        raw[..., first : first + 2] = scales.astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        raw[..., 0] = numbers.integers(118, 122, raw.shape[:2])
    return raw.reshape(rows, -1)


def _raw(array: np.ndarray, kind: str) -> np.ndarray:
    try:
        return gguf.quantize(array, GGMLQuantizationType[kind])
    except NotImplementedError:
        return random_blocks(kind, *array.shape, 0.2 / 32 / 16)


def _tensors(config: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Returns the tensors of a file by their names, each as (name in transformers, numbers, order of rows or None)."""
    kind = config["model_type"]
    names = _NAMES | _ARCHITECTURES[kind]
    found: dict[str, list[Any]] = {}
    for name, tensor in sorted(tensors.items()):
        stem, _, suffix = name.rpartition(".")
        if stem in names:
            found[f"{names[stem]}.{suffix}"] = [(name, tensor, None)]
            continue
        _, _, layer, rest = stem.split(".", 3)
        if ".experts." in rest:
            part = {"w1": "gate", "w3": "up", "w2": "down"}[rest.rpartition(".")[2]]
            found.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append((name, tensor, None))
            continue
        if rest.endswith(".gate"):
            found[f"blk.{layer}.ffn_gate_inp.weight"] = [(name, tensor, None)]
            continue
        own = names[rest]
        rows = None
        if own in ("attn_q", "attn_k") and kind in ("llama", "mixtral"):
            heads = config["num_attention_heads" if own == "attn_q" else "num_key_value_heads"]
            rows = np.arange(len(tensor)).reshape(heads, 2, -1).swapaxes(1, 2).ravel()
        if kind == "gemma2" and own.endswith("norm"):
            tensor = tensor + 1
        found[f"blk.{layer}.{own}.{suffix}"] = [(name, tensor, rows)]
    if kind == "gemma2":
        found["output_norm.weight"] = [(name, tensor + 1, None) for name, tensor, _ in found["output_norm.weight"]]
    return found


def _without_offsets(config: dict[str, Any], numbers: dict[str, torch.Tensor]) -> None:
    for name in numbers:
        if config["model_type"] == "gemma2" and "norm" in name:
            numbers[name] = numbers[name] - 1


def _metadata(architecture: str, config: dict[str, Any]) -> dict[str, Any]:
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": config.get("head_dim"),
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "expert_count": config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok") if config["model_type"] == "mixtral" else None,
    }
    if architecture == "gemma2":
        own |= {
            "attention.sliding_window": config["sliding_window"],
            "attn_logit_softcapping": config["attn_logit_softcapping"],
            "final_logit_softcapping": config["final_logit_softcapping"],
        }
    return {f"{architecture}.{name}": value for name, value in own.items()}


def tokenizer_entries(model: Path) -> dict[str, Any]:
    """Returns the metadata of the tokenizer in a model's folder."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
    special = {each["id"] for each in content["added_tokens"] if each["special"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [token for token, _ in vocabulary],
        "tokenizer.ggml.token_type": [3 if place in special else 1 for _, place in vocabulary],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{% for message in messages %}{{ message.content }}\n{% endfor %}",
    }


def words(count: int) -> dict[str, Any]:
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"word {place}" for place in range(count)],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 2,
    }


def add_metadata(writer: GGUFWriter, entries: Mapping[str, Any]) -> None:
    """Adds metadata to a file, but for those that are None."""
    for name, value in entries.items():
        if value is not None:
            _add(writer, name, value)


def finish(writer: GGUFWriter) -> None:
    """Writes the file of a writer that has all metadata and tensors."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _:
            writer.add_array(name, value)
