"""The network of EAGLE-3: one decoder layer over the model's own hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025. Its layer
reads the embedding of a token beside the features of the token before: hidden states of three layers of the model,
projected to one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel

from tgi_server.engine.backends import Backend
from tgi_server.engine.checkpoint.load_model import load_layer
from tgi_server.engine.checkpoint.reader import Checkpoint, open_checkpoint
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.models.spec import DecoderSpec, LayerSpec, NoSpec, activation
from tgi_server.engine.speculation.layer_model import LayerModel

_LAYER = "model.layers.0."
# Beginnings of names in the format of vLLM and SGLang, without "model.", and those in the model that is made of them.
_NAMES = {
    "midlayer.": _LAYER,
    "layers.0.": _LAYER,
    "embed_tokens.": "model.embed_tokens.",
    "norm.": "model.norm.",
    "fc.": "fc.",
    "lm_head.": "lm_head.",
}


def read_eagle(
    folder: Path, settings: Mapping[str, Any], model: PreTrainedModel, backend: Backend
) -> tuple[LayerModel, Tensor | None]:
    """Returns the network in a folder of the format that vLLM and SGLang load, and the ids of its tokens.

    settings: the folder's config.json. backend: the model's backend. The ids are [drafter's vocabulary] int64, or None
    if it has the model's vocabulary. Raises InvalidWeights or UnsupportedModel.
    """
    kind, layers = settings.get("model_type"), settings.get("num_hidden_layers")
    if (kind, layers) != (LlamaConfig.model_type, 1):
        raise UnsupportedModel(
            f"{folder} has {layers} layers of the kind {kind}; for EAGLE-3 only one Llama layer is supported"
        )
    config = LlamaConfig.from_dict(dict(settings))
    with open_checkpoint(folder) as tensors:
        features = tensors["fc.weight"].shape[1] if "fc.weight" in tensors else None
        offsets = tensors["d2t"][...] if "d2t" in tensors else None
        names = {f"{prefix}{name}": own for name, own in _NAMES.items() for prefix in ("", "model.")}
    hidden_size = model.config.get_text_config(decoder=True).hidden_size
    if features not in (None, 3 * hidden_size):
        raise UnsupportedModel(
            f"{folder} is for a model with a hidden size of {features // 3}, but the model has "
            f"{hidden_size}; name the model that it was made for"
        )
    config.tie_word_embeddings = False
    network: Any = load_layer(folder, config, names, _arrange, "EAGLE-3", model.dtype, model.device)
    embedding = None if network.get_input_embeddings() is not None else model.get_input_embeddings()
    head = None if network.get_output_embeddings() is not None else model.get_output_embeddings()
    layer = backend.layer_model(network, _spec(folder, config), {}, embedding, head)
    backend.pack(network)
    eagle = LayerModel(layer, 3 * hidden_size, network.fc, normed=False)
    if offsets is None:
        return eagle, None
    return eagle, (torch.arange(len(offsets)) + offsets).to(model.device, torch.int64)


def _spec(folder: Path, config: LlamaConfig) -> DecoderSpec:
    layer = LayerSpec(
        attention_norm="hidden_norm",
        token_norm="input_layernorm",
        normed_residual=bool(getattr(config, "norm_before_residual", False)),
    )
    try:
        return DecoderSpec.uniform(config, layer, activation=activation(config.hidden_act))
    except NoSpec as reason:
        raise UnsupportedModel(f"{folder}: {reason}") from reason


def _arrange(model: Any, tensors: Checkpoint) -> None:
    """Makes a Llama of one layer the network: with what reads features, and the parts that the checkpoint has."""
    decoder, size = model.model, model.config.hidden_size
    layer = decoder.layers[0]
    model.fc = _linear("fc", 3 * size, size, tensors)
    layer.hidden_norm = type(layer.input_layernorm)(size, eps=model.config.rms_norm_eps)
    for name in ("q_proj", "k_proj", "v_proj"):
        own = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, _linear(f"{_LAYER}self_attn.{name}", 2 * size, own.out_features, tensors))
    if "lm_head.weight" in tensors:
        model.lm_head = _linear("lm_head", size, tensors["lm_head.weight"].shape[0], tensors)
    else:
        model.lm_head = None
    if "model.embed_tokens.weight" not in tensors:
        decoder.embed_tokens = None


def _linear(name: str, inputs: int, outputs: int, tensors: Checkpoint) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=f"{name}.bias" in tensors)
