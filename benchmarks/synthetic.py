"""Writes models of real shapes with random weights, complete with a tokenizer, to measure servers with.

python -m benchmarks.synthetic opt-125m llama-360m
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)
from transformers.utils.logging import disable_progress_bar

from benchmarks import synthetic_vision
from benchmarks.synthetic_tokenizer import build_tokenizer, save_tokenizer
from benchmarks.words import COMMON
from benchmarks.workloads import adapter_name, positive
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS

FOLDER = Path("runs/synthetic")
# Weights of what is added to the residual stream.
_ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "fc2.weight", "embed_positions.weight")


@dataclass(frozen=True)
class SyntheticModel:
    """A model's shape, its special tokens in the order of their ids, and which of them begins, ends and pads.

    copies: its greedy replies repeat the prompts of W8. processor: files of one that reads images, by their names.
    """

    config: PretrainedConfig
    special_tokens: tuple[str, ...]
    copies: bool = False
    processor: Mapping[str, dict[str, Any]] = field(default_factory=dict)


# The shape of facebook/opt-125m.
_OPT_125M = OPTConfig(
    vocab_size=50272,
    hidden_size=768,
    num_hidden_layers=12,
    ffn_dim=3072,
    num_attention_heads=12,
    max_position_embeddings=2048,
    word_embed_proj_dim=768,
    pad_token_id=1,
    bos_token_id=2,
    eos_token_id=2,
)
# A Llama with grouped-query attention, of the shape that small assistants of 360M parameters have.
_LLAMA_360M = LlamaConfig(
    vocab_size=49152,
    hidden_size=960,
    num_hidden_layers=32,
    intermediate_size=2560,
    num_attention_heads=15,
    num_key_value_heads=5,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    pad_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
)
# The same with the vocabulary of Llama 3.
_LLAMA_360M_128K = LlamaConfig(**(_LLAMA_360M.to_diff_dict() | {"vocab_size": 128256}))
# The same with positions for the longest of the public loads.
_LLAMA_360M_16K = LlamaConfig(**(_LLAMA_360M.to_diff_dict() | {"max_position_embeddings": 16384}))
# The shape of TinyLlama 1.1B.
_LLAMA_1B = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    num_hidden_layers=22,
    intermediate_size=5632,
    num_attention_heads=32,
    num_key_value_heads=4,
    max_position_embeddings=2048,
    pad_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
)
# The shape of Llama 3.1 8B, without its scaling of positions.
_LLAMA_8B = LlamaConfig(
    vocab_size=128256,
    hidden_size=4096,
    num_hidden_layers=32,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    pad_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
)
# A mixture of 1.3B parameters; a token uses 230M, 4 of 32 experts in each layer.
_MIXTURE_1B = Qwen3MoeConfig(
    vocab_size=32000,
    hidden_size=1024,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=768,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    pad_token_id=2,
    bos_token_id=1,
    eos_token_id=2,
)
# Hybrids of some 100M parameters: three recurrent layers to one of attention; a Llama of the same sizes, and one of the
# bytes of the Qwen3.5.
_SHAPE_100M = {
    "vocab_size": 16000,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_THREE_TO_ONE = {"layer_types": 3 * [*3 * ["linear_attention"], "full_attention"]}
_DELTA_RULE = _THREE_TO_ONE | {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 96,
}
_QWEN35_100M = AutoConfig.for_model("qwen3_5_text", **_SHAPE_100M | _DELTA_RULE)
_BAMBA_100M = AutoConfig.for_model(
    "bamba",
    **_SHAPE_100M | {"attn_layer_indices": [3, 7, 11], "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128},
)
_JAMBA_100M = AutoConfig.for_model(
    "jamba", **_SHAPE_100M | {"attn_layer_period": 4, "attn_layer_offset": 3, "num_experts": 1, "mamba_d_state": 16}
)
_LFM2_100M = AutoConfig.for_model(
    "lfm2", **_SHAPE_100M | {"layer_types": 3 * [*3 * ["conv"], "full_attention"], "block_auto_adjust_ff_dim": False}
)
_KIMI_100M = AutoConfig.for_model(
    "kimi_linear",
    **_SHAPE_100M
    | _THREE_TO_ONE
    | {"linear_num_heads": 8, "linear_head_dim": 96, "kv_lora_rank": 128, "q_lora_rank": None}
    | {"qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "mlp_layer_types": 12 * ["dense"]},
)
MODELS = {
    "opt-125m": SyntheticModel(_OPT_125M, ("<s>", "<pad>", "</s>", "<unk>")),
    "llama-360m": SyntheticModel(_LLAMA_360M, ("<unk>", "<s>", "</s>")),
    "llama-360m-128k": SyntheticModel(_LLAMA_360M_128K, ("<unk>", "<s>", "</s>")),
    "llama-360m-16k": SyntheticModel(_LLAMA_360M_16K, ("<unk>", "<s>", "</s>")),
    "opt-125m-copying": SyntheticModel(_OPT_125M, ("<s>", "<pad>", "</s>", "<unk>"), copies=True),
    "llama-360m-copying": SyntheticModel(_LLAMA_360M, ("<unk>", "<s>", "</s>"), copies=True),
    "llama-1.1b": SyntheticModel(_LLAMA_1B, ("<unk>", "<s>", "</s>")),
    "mixture-1b": SyntheticModel(_MIXTURE_1B, ("<unk>", "<s>", "</s>")),
    "llama-100m": SyntheticModel(LlamaConfig(**_SHAPE_100M), ("<unk>", "<s>", "</s>")),
    "llama-115m": SyntheticModel(LlamaConfig(**_SHAPE_100M | {"intermediate_size": 2560}), ("<unk>", "<s>", "</s>")),
    "qwen3.5-100m": SyntheticModel(_QWEN35_100M, ("<unk>", "<s>", "</s>")),
    "bamba-100m": SyntheticModel(_BAMBA_100M, ("<unk>", "<s>", "</s>")),
    "jamba-100m": SyntheticModel(_JAMBA_100M, ("<unk>", "<s>", "</s>")),
    "kimi-linear-100m": SyntheticModel(_KIMI_100M, ("<unk>", "<s>", "</s>")),
    "lfm2-100m": SyntheticModel(_LFM2_100M, ("<unk>", "<s>", "</s>")),
    "llama-8b": SyntheticModel(_LLAMA_8B, ("<unk>", "<s>", "</s>")),
    "smolvlm-500m": SyntheticModel(
        synthetic_vision.SMOLVLM_500M, synthetic_vision.SPECIAL_TOKENS, processor=synthetic_vision.PROCESSOR
    ),
}
WRITTEN = ("opt-125m", "llama-360m")


def build_model(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """Makes a model with random weights where it runs, in evaluation mode; nothing of it is ever in a file."""
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    with device:
        model: PreTrainedModel = kind.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def round_weights(model: PreTrainedModel, way: str) -> int:
    """Rounds the weights of all linear layers but the head, as `--quantize` does. Returns the bytes that this saves."""
    saved, round_weight = 0, ROUNDINGS[way][1]
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not model.get_output_embeddings():
            layer = QuantizedLinear(module)
            with module.weight.device:
                layer.fill(round_weight(module.weight.float()))
            saved += module.weight.nbytes - layer.nbytes
            model.set_submodule(path, layer.to(module.weight.device))
    return saved


def write_model(model: SyntheticModel, folder: Path, device: torch.device | str = "cpu") -> None:
    """Writes config, weights (bfloat16, standard deviation 0.02, the same ones every time) and tokenizer.

    device: makes the random numbers; another kind of device, other numbers.
    """
    config = deepcopy(model.config)
    text = config.get_text_config()
    config.tie_word_embeddings &= not model.copies
    disable_progress_bar()
    weights = build_model(config, torch.device(device), torch.bfloat16)
    weights.generation_config.do_sample = False
    tokenizer = build_tokenizer(text.vocab_size, list(model.special_tokens))
    if model.copies:
        _make_copying(weights, tokenizer)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    weights.save_pretrained(partial)
    names = model.special_tokens
    roles = {
        "bos_token": names[text.bos_token_id],
        "eos_token": names[text.eos_token_id],
        "pad_token": names[text.pad_token_id],
        "unk_token": "<unk>",
    }
    save_tokenizer(tokenizer, roles, text.max_position_embeddings, partial)
    for name, content in model.processor.items():
        (partial / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


@torch.no_grad()
def _make_copying(weights: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Makes the likeliest token after a common word the one that follows it in their list, whatever came before.

    Layers compute as ever, but add nothing; the head's row of a word is the embedding of the word before it.
    """
    for name, parameter in weights.named_parameters():
        if name.endswith(_ADDING):
            parameter.zero_()
    ids = torch.tensor([tokenizer.encode(f" {word}").ids[0] for word in COMMON])
    head, embedding = weights.get_output_embeddings().weight, weights.get_input_embeddings().weight
    head[ids.roll(-1)] = embedding[ids]


def write_adapters(model: SyntheticModel, folder: Path, count: int, rank: int) -> None:
    """Writes LoRA adapters of all attention and feed-forward layers, bfloat16, in the format of `peft`."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    head = empty.get_output_embeddings()
    linears = {
        path: module for path, module in empty.named_modules() if isinstance(module, nn.Linear) and module is not head
    }
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": sorted({path.rpartition(".")[2] for path in linears}),
        "base_model_name_or_path": None,
        "inference_mode": True,
    }
    torch.manual_seed(0)
    for number in range(count):
        tensors = {}
        for path, linear in linears.items():
            for name, shape in (("A", (rank, linear.in_features)), ("B", (linear.out_features, rank))):
                tensors[f"base_model.model.{path}.lora_{name}.weight"] = torch.randn(shape, dtype=torch.bfloat16) * 0.02
        place = folder / adapter_name(number)
        place.mkdir(parents=True, exist_ok=True)
        save_file(tensors, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps(settings, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(WRITTEN),
                        help=f"{', '.join(MODELS)} (default: {' '.join(WRITTEN)})")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where to (default: %(default)s)")
    parser.add_argument("--device", type=torch.device, default="cpu", help="makes the weights (default: %(default)s)")
    parser.add_argument(
        "--adapters", type=int, default=0, help="LoRA adapters to write for each model, for W7 (default: 0)"
    )
    parser.add_argument("--rank", type=positive, default=16, help="of an adapter (default: %(default)s)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.models if name not in MODELS]:
        parser.error(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    for name in arguments.models:
        folder = arguments.folder / name
        print(f"writing {folder}", flush=True)
        write_model(MODELS[name], folder, arguments.device)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(f"wrote {folder}: {size / 1e6:.0f} MB")
        if arguments.adapters:
            write_adapters(MODELS[name], folder.with_name(f"{name}-adapters"), arguments.adapters, arguments.rank)


if __name__ == "__main__":
    main()
