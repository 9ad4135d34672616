"""Tiny random models that embed and rank, in the folders that `transformers` and sentence-transformers save.

folder = make_embedder("bert", tmp_path, pooling="cls", normalize=True)
folder = make_ranker("xlm-roberta", tmp_path)
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from tests.tiny_models import NOISE, SCALE, TOKENIZER_VOCAB_SIZE, make_tokenizer

MOST_TOKENS = 64
_SMALL: dict[str, Any] = {
    "vocab_size": TOKENIZER_VOCAB_SIZE + 8,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": MOST_TOKENS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MODERN = {"global_attn_every_n_layers": 2, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {},
    "modernbert": _MODERN,
    "nomic_bert": {"rotary_emb_fraction": 1.0},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "roberta": {"max_position_embeddings": MOST_TOKENS + 1, "type_vocab_size": 1},
    "xlm-roberta": {"max_position_embeddings": MOST_TOKENS + 1, "type_vocab_size": 1},
}


def make_embedder(
    kind: str, folder: Path, *, pooling: str = "mean", normalize: bool = False, dense: int = 0, **settings: Any
) -> Path:
    """Saves a model with the modules of sentence-transformers, and two prompts. dense: outputs of a dense layer.

    settings: of the model.
    """
    model = _build(AutoModel, kind, **settings)
    model.config.architectures = ["Qwen3ForCausalLM"] if kind == "qwen3" else None
    _save(model, kind, folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    _write(folder / "1_Pooling/config.json", {"word_embedding_dimension": 48, _POOLING_FLAGS[pooling]: True})
    if dense:
        modules.append(("2_Dense", "Dense"))
        activation = "torch.nn.modules.activation.Tanh"
        settings = {"in_features": 48, "out_features": dense, "bias": True, "activation_function": activation}
        _write(folder / "2_Dense/config.json", settings)
        generator = torch.Generator().manual_seed(1)
        weights = {"linear.weight": torch.randn(dense, 48, generator=generator), "linear.bias": torch.ones(dense)}
        save_file(weights, folder / "2_Dense/model.safetensors")
    if normalize:
        modules.append(("3_Normalize", "Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (path, name) in enumerate(modules)
    ]
    _write(folder / "modules.json", listed)
    _write(folder / "config_sentence_transformers.json", {"prompts": {"query": "search: ", "document": ""}})
    return folder


def make_ranker(kind: str, folder: Path, *, labels: int = 1) -> Path:
    """Saves a sequence classifier."""
    names = {index: f"label {index}" for index in range(labels)}
    return _save(_build(AutoModelForSequenceClassification, kind, id2label=names), kind, folder)


def make_yes_or_no_ranker(folder: Path) -> Path:
    """Saves a decoder in the form of Qwen3-Reranker."""
    return _save(_build(AutoModelForCausalLM, "qwen3", max_position_embeddings=256), "qwen3", folder)


_POOLING_FLAGS = {
    "cls": "pooling_mode_cls_token",
    "lasttoken": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}


@torch.no_grad()
def _build(factory: Any, kind: str, **more: Any) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = factory.from_config(AutoConfig.for_model(kind, **_SMALL | SETTINGS[kind] | more))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(SCALE)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=NOISE)
    return model


def _save(model: PreTrainedModel, kind: str, folder: Path) -> Path:
    """Saves a model with a tokenizer that puts `<s>` before a text and `</s>` after it, as for models of this kind."""
    model.save_pretrained(folder)
    tokenizer = make_tokenizer()
    if kind == "qwen3":
        tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
        tokenizer.add_tokens(["yes", "no"])
        single, pair = "$A </s>", "$A $B </s>"
    else:
        single, pair = "<s> $A </s>", "<s> $A </s> $B:1 </s>:1"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    _write(folder / "tokenizer_config.json", names | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return folder


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(content))
