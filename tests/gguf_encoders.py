"""Tiny embedding models as GGUF files, beside folders in transformers format with the same numbers.

file, dense = write_embedder("bert", tmp_path, "Q8_0", pooling="cls")
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file, save_file
from tokenizers.implementations import BertWordPieceTokenizer

from tests.gguf_models import add_metadata, finish, tokenizer_entries
from tests.tiny_encoders import make_embedder

POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3, "rank": 4}
_ARCHITECTURES = {
    "bert": gguf.MODEL_ARCH.BERT,
    "nomic_bert": gguf.MODEL_ARCH.NOMIC_BERT,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}
_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_LETTERS = "abcdefghijklmnopqrstuvwxyz,.!?"
_WORDS = (*_MARKS, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), "the", "egg", "lazy", "##er", "##ing")
# Widths that whole blocks of all types fit in.
_WIDE = {"hidden_size": 64, "intermediate_size": 128}


def write_embedder(kind: str, folder: Path, quantized: str = "F32", *, pooling: str = "mean") -> tuple[Path, Path]:
    """Writes a model as a GGUF file, as llama.cpp's converter does. quantized: the type of all matrices.

    Returns the file, and a folder with its numbers.
    """
    reads_words = kind != "qwen3"
    vocabulary = {"vocab_size": len(_WORDS)} if reads_words else {}
    pooled = "mean" if pooling == "rank" else pooling
    dense = make_embedder(kind, folder / f"{kind}-dense", pooling=pooled, **_WIDE, **vocabulary)
    config = json.loads((dense / "config.json").read_text())
    if reads_words:
        tokenizer = BertWordPieceTokenizer({word: place for place, word in enumerate(_WORDS)})
        tokenizer.save(str(dense / "tokenizer.json"))
    architecture, name = _ARCHITECTURES[kind], gguf.MODEL_ARCH_NAMES[_ARCHITECTURES[kind]]
    file = folder / f"{kind}.gguf"
    writer = GGUFWriter(file, name)
    entries = {f"{name}.{key}": value for key, value in _metadata(config, pooling).items()}
    add_metadata(writer, entries | (_words() if reads_words else _pairs(dense)))
    numbers: dict[str, torch.Tensor] = {}
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for own, tensor in load_file(dense / "model.safetensors").items():
        numbers[own] = tensor
        if "pooler" in own:
            continue  # converters leave it out
        found = names.get_name(own if reads_words else f"model.{own}", try_suffixes=(".weight", ".bias"))
        assert found is not None, own
        array = np.ascontiguousarray(tensor.float().numpy())
        stored = GGMLQuantizationType[quantized if array.ndim > 1 else "F32"]
        raw = gguf.quantize(array, stored)
        writer.add_tensor(found, raw, raw_dtype=stored)
        numbers[own] = torch.from_numpy(gguf.dequantize(raw, stored).reshape(array.shape).astype(np.float32))
    save_file(numbers, dense / "model.safetensors", metadata={"format": "pt"})
    finish(writer)
    return file, dense


def _metadata(config: dict[str, Any], pooling: str) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "attention.key_length": config.get("head_dim"),
        "attention.layer_norm_epsilon": config.get("layer_norm_eps"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "rope.freq_base": rope.get("rope_theta"),
        "pooling_type": POOLINGS[pooling],
    }


def _words() -> dict[str, Any]:
    """Returns words as converters write them: the beginnings are marked, and not what continues them."""
    marked = [word if word in _MARKS else word[2:] if word.startswith("##") else f"\u2581{word}" for word in _WORDS]
    return {
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.pre": "jina-v2-en",
        "tokenizer.ggml.tokens": marked,
        "tokenizer.ggml.token_type": [3 if word in _MARKS else 1 for word in _WORDS],
        "tokenizer.ggml.token_type_count": 2,
        "tokenizer.ggml.unknown_token_id": 1,
        "tokenizer.ggml.seperator_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.cls_token_id": 2,
    }


def _pairs(dense: Path) -> dict[str, Any]:
    own = {"add_bos_token": False, "add_eos_token": True}
    entries = tokenizer_entries(dense) | {f"tokenizer.ggml.{name}": value for name, value in own.items()}
    return {name: value for name, value in entries.items() if "chat_template" not in name}
