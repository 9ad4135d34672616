"""The network for multi-token prediction that many checkpoints bring along: one more decoder layer.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024. The layer reads the embedding of a token beside the hidden state that
the model has of the token before.
"""

import copy
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from tgi_server.engine.backends import Backend
from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.checkpoint.load_model import load_layer
from tgi_server.engine.checkpoint.quantized import Quantization
from tgi_server.engine.checkpoint.reader import Checkpoint, open_checkpoint
from tgi_server.engine.models.families import family_of, spec_of
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.speculation.layer_model import LayerModel

# The modules around the layer, in the model that is made of it: the norms of the embedding and of the hidden state,
# the projection of both, and the last norm; and their names in checkpoints. In checkpoints like DeepSeek's, the layer's
# number follows that of the last decoder layer.
_AROUND = ("token_norm.", "hidden_norm.", "joined.", "model.norm.")
_DEEPSEEK = ("enorm.", "hnorm.", "eh_proj.", "shared_head.norm.")
_QWEN = ("pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "fc.", "norm.")


def read_mtp(
    folder: Path,
    model: PreTrainedModel,
    backend: Backend,
    variants: Iterable[AttentionVariant],
    quantization: Quantization | None,
    group: ShardGroup | None,
) -> LayerModel | None:
    """Returns the network for multi-token prediction in a model's own checkpoint; None if it has no known one.

    backend, variants, quantization: the model's backend, attention variants and quantization. group: the shards of the
    model, among which the layer is split like the model; None for a single shard. Raises InvalidWeights or Unfit.
    """
    text = model.config.get_text_config(decoder=True)
    if not family_of(text).mtp:
        return None
    with open_checkpoint(folder) as tensors:
        names = _names(tensors, text.num_hidden_layers)
    if names is None:
        return None
    config = _config_of(text)
    what = "the layer for multi-token prediction"
    network: Any = load_layer(folder, config, names, _arrange, what, model.dtype, model.device, quantization, group)
    embedding = model.get_input_embeddings()
    plain = next(variant for variant in variants if not variant.window)
    layer = backend.layer_model(
        network, spec_of(config), {0: replace(plain, latents=None)}, embedding, model.get_output_embeddings()
    )
    backend.pack(network)

    def join(tokens: Tensor, hidden: Tensor) -> Tensor:
        both = torch.cat([network.token_norm(embedding(tokens)), network.hidden_norm(hidden)], -1)
        joined: Tensor = network.joined(both)
        return joined

    final_norm = model.get_decoder().norm
    return LayerModel(layer, text.hidden_size, final_norm, join, normed=True)


def _names(tensors: Checkpoint, layers: int) -> dict[str, str] | None:
    """Returns the prefixes of tensor names in the checkpoint and those in the network; None if there is no network.

    layers: the number of decoder layers. In DeepSeek's checkpoints it is also the number of the network's layer.
    """
    for around, layer, pattern in (
        (_DEEPSEEK, "", rf"(.*\blayers\.{layers}\.)eh_proj\.weight"),
        (_QWEN, "layers.0.", r"(.*\bmtp\.)fc\.weight"),
    ):
        found = next(filter(None, (re.fullmatch(pattern, name) for name in tensors)), None)
        if found is not None:
            names = {f"{found[1]}{name}": own for name, own in zip(around, _AROUND, strict=True)}
            return names | {f"{found[1]}{layer}": "model.layers.0."}
    return None


def _config_of(text: PretrainedConfig) -> PretrainedConfig:
    """Returns the configuration by which the family's decoder layer is one with attention and its usual experts."""
    config: Any = copy.deepcopy(text)
    changes = {
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "first_k_dense_replace": 0,
        "mlp_layer_types": ["sparse"],
        "indexer_types": ["full"],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    }
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    return config


def _arrange(model: Any, _: Checkpoint) -> None:
    """Makes a model of one layer the network, without embedding and head, which are the model's."""
    decoder, size = model.get_decoder(), model.config.hidden_size
    model.token_norm, model.hidden_norm = (type(decoder.norm)(size, eps=model.config.rms_norm_eps) for _ in range(2))
    model.joined = nn.Linear(2 * size, size, bias=False)
    decoder.embed_tokens = model.lm_head = None
