"""Adapters as GGUF files, made of those that `peft` wrote, with the names that the package `gguf` has for tensors.

file = write_gguf_adapter(folder, model, tmp_path / "chef.gguf")
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import load_file

from tests.gguf_by_names import ARCHITECTURES, by_value_head
from tests.gguf_models import add_metadata, finish

_OLDER = {"gemma2": gguf.MODEL_ARCH.GEMMA2, "llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA}
_OLDER |= {"phi3": gguf.MODEL_ARCH.PHI3, "qwen2": gguf.MODEL_ARCH.QWEN2}


def write_gguf_adapter(adapter: Path, model: Path, file: Path, kind: str = "F32", **metadata: Any) -> Path:
    """Writes an adapter of a model as a GGUF file, as llama.cpp's converter does.

    kind: the type of matrices that are wide enough. metadata: other entries than the usual ones, with `__` for a dot;
    None leaves one out.
    """
    config = json.loads((model / "config.json").read_text())
    architecture = (_OLDER | ARCHITECTURES)[config["model_type"]]
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    file.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture])
    entries = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(json.loads((adapter / "adapter_config.json").read_text())["lora_alpha"]),
    }
    add_metadata(writer, entries | {name.replace("__", "."): value for name, value in metadata.items()})
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        path, _, matrix = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
        found = names.get_name(path)
        assert found is not None, path
        array = np.ascontiguousarray(_as_in_files(config, path, matrix, tensor.float()).numpy())
        own = GGMLQuantizationType[kind if array.shape[-1] % 32 == 0 else "F32"]
        writer.add_tensor(f"{found}.weight.{matrix.lower()}", gguf.quantize(array, own), raw_dtype=own)
    finish(writer)
    return file


def _as_in_files(config: dict[str, Any], path: str, matrix: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns a matrix with its outputs, or its inputs, in the order of files."""
    if "linear_attn" in path:
        of_inputs = path.endswith("out_proj")
        return by_value_head(config, path, tensor) if of_inputs == (matrix == "lora_A") else tensor
    if matrix == "lora_A" or config["model_type"] not in ("llama", "mistral"):
        return tensor
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(path.rpartition(".")[2])
    if heads is None:
        return tensor
    return torch.cat([head.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for head in tensor.chunk(config[heads])])
