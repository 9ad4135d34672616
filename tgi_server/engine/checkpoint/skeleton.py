"""A model of `transformers` before it has weights: without the parts that are not loaded, and with layers for weights
that stay quantised.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.checkpoint.fill import by_model_names
from tgi_server.engine.checkpoint.quantized import Experts, QuantizedEmbedding, QuantizedLinear
from tgi_server.engine.checkpoint.reader import Checkpoint, QuantizedTensor, SlicedTensor
from tgi_server.engine.checkpoint.weight_files import EXPERT
from tgi_server.engine.errors import InvalidWeights
from tgi_server.engine.progress import counted

# The layer that a path or a name is of; and what an expert's layers for gate, up and down are called in checkpoints.
_LAYER = re.compile(r"\blayers\.\d+\b")
_EXPERT_NAMES = (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"))
# Weights that stay quantised, each with the paths of the linear layers that it fills: one, or one for each expert.
_Kept = list[tuple[QuantizedTensor, list[str]]]


@dataclass(frozen=True, slots=True)
class QuantizedLayers:
    """The weights of a checkpoint that stay quantised, and the layers of a model for them.

    linears, embeddings: with the path of the layer that each fills. experts: by the path of each layer's experts.
    tied: the head and the embedding share one of `linears`.
    """

    linears: _Kept
    embeddings: _Kept
    experts: dict[str, _Kept]
    tied: bool

    @classmethod
    def of(cls, model: PreTrainedModel, tensors: Checkpoint) -> Self:
        """model: on no device. Its linear layers and embeddings say which weights may stay quantised."""
        by_name = by_model_names(get_model_conversion_mapping(model), tensors)
        linears = _linears(model, by_name)
        tied = _tied(model, by_name) is not None
        return cls(linears, _embeddings(model, by_name), _experts(model, by_name), tied)

    def weights(self) -> _Kept:
        return [*self.linears, *self.embeddings, *(weight for layer in self.experts.values() for weight in layer)]

    def others(self, tensors: Checkpoint) -> Checkpoint:
        """Returns the tensors that do not stay quantised."""
        stored = {id(tensor) for tensor, _ in self.weights()}
        return {name: tensor for name, tensor in tensors.items() if id(tensor) not in stored}

    def place(self, model: PreTrainedModel) -> None:
        """Puts layers without weights in the places of plain ones."""
        for _, (path,) in self.linears:
            model.set_submodule(path, QuantizedLinear(model.get_submodule(path)))
        for _, (layer_path,) in self.embeddings:
            path = layer_path.removesuffix(".own")
            model.set_submodule(path, QuantizedEmbedding.of(model.get_submodule(path)))
        if self.tied:
            embedding = QuantizedEmbedding.of(model.get_input_embeddings(), model.get_output_embeddings())
            model.set_input_embeddings(embedding)
        _untie_quantized(model)
        for path, of_layer in self.experts.items():
            parts = 1 if of_layer[0][0].stacked else 2
            model.set_submodule(path, Experts.quantized(model.get_submodule(path), parts))

    def fill(self, model: PreTrainedModel, folder: Path, device: torch.device, stage: str) -> None:
        """Reads the weights into the layers. folder: for errors. stage: of loading. Raises InvalidWeights."""
        weights = self.weights()
        for tensor, paths in counted(stage, weights, len(weights)):
            _check_shape(folder, tensor, [model.get_submodule(path) for path in paths])
            for path, weight in zip(paths, tensor.weights(), strict=True):
                layer: Any = model.get_submodule(path)
                layer.fill(weight)
                layer.to(device)


def leave_out_images(model: PreTrainedModel) -> None:
    """Removes the modules that read images from a model that has them, so that no weights are read for them."""
    decoder, base = model.get_decoder(), model.base_model
    if decoder is base or model.config.is_encoder_decoder:
        return
    for name, child in list(base.named_children()):
        if all(module is not decoder for module in child.modules()):
            setattr(base, name, None)


def leave_out_text(model: PreTrainedModel) -> None:
    """Removes the text model and the head from a model that reads images, too."""
    decoder, base = model.get_decoder(), model.base_model
    for parent in {model, base}:
        for name, child in list(parent.named_children()):
            head = parent is model and parent is not base and child is not base
            if child is not base and (head or any(module is decoder for module in child.modules())):
                setattr(parent, name, None)


def _linears(model: PreTrainedModel, tensors: Checkpoint) -> _Kept:
    """Returns the weights of linear layers that stay quantised.

    Weights of other layers, and weights that `transformers` converts, become dense as they are read. The head
    is not rounded.
    """
    head = model.get_output_embeddings()
    found: _Kept = []
    for path, module in model.named_modules():
        tensor = _named(model, tensors, f"{path}.weight")
        if module is head and tensor is None:
            tensor = _tied(model, tensors)
        if isinstance(tensor, QuantizedTensor) and not tensor.stacked:
            if type(module) is nn.Linear and not (tensor.plain and module is head):
                found.append((tensor, [path]))
            tensor.transposed = type(module) is Conv1D
    return found


def _tied(model: PreTrainedModel, tensors: Checkpoint) -> QuantizedTensor | None:
    """Returns the weight of the head and of the embedding that share it, if it stays quantised."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None:  # which are another model's
        return None
    if head.weight is not embedding.weight or not _may_stay_quantized(model, embedding):
        return None
    paths = {module: path for path, module in model.named_modules()}
    if _named(model, tensors, f"{paths[head]}.weight") is not None:
        return None
    tensor = _named(model, tensors, f"{paths[embedding]}.weight")
    return tensor if isinstance(tensor, QuantizedTensor) and tensor.plain is None else None


def _embeddings(model: PreTrainedModel, tensors: Checkpoint) -> _Kept:
    """Returns the weights of embeddings that stay quantised, with the paths of the linear layers that have them.

    That is the head where it has the same weight, which it is read for, or else a layer of the embedding's own.
    """
    tied, found = _tied(model, tensors), []
    for path, module in model.named_modules():
        tensor = _named(model, tensors, f"{path}.weight") if _may_stay_quantized(model, module) else None
        if isinstance(tensor, QuantizedTensor) and tensor.plain is None and tensor is not tied:
            found.append((tensor, [f"{path}.own"]))
    return found


def _may_stay_quantized(model: PreTrainedModel, embedding: nn.Module) -> bool:
    return QuantizedEmbedding.fits(embedding) and not model.config.is_encoder_decoder


def _experts(model: PreTrainedModel, tensors: Checkpoint) -> dict[str, _Kept]:
    """Returns the weights of experts that stay quantised, by the path of each layer's experts.

    Where one of a layer's is missing, is not quantised or has another name, they become dense as they are read.
    """
    apart: dict[tuple[str, str, int], QuantizedTensor] = {}
    for name, tensor in tensors.items():
        layer, expert = _LAYER.search(name), EXPERT.fullmatch(name)
        if layer and expert and isinstance(tensor, QuantizedTensor):
            apart[layer[0], expert[3].removesuffix(".weight"), int(expert[2])] = tensor
    found: dict[str, _Kept] = {}
    for path, module in model.named_modules():
        layer = _LAYER.search(path)
        own: Any = module
        if layer is None or not Experts.fits(module) or not own.has_gate:
            continue
        numbers = range(len(own.down_proj))
        together = [_named(model, tensors, f"{path}.{name}") for name in ("gate_up_proj", "down_proj")]
        stacked = [tensor for tensor in together if isinstance(tensor, QuantizedTensor) and tensor.stacked]
        if len(stacked) == len(together) and own.is_transposed:
            places = [[f"{path}.{place.format(n)}" for n in numbers] for place in ("gate_up.{}.0", "down.{}")]
            found[path] = list(zip(stacked, places, strict=True))
        for names in _EXPERT_NAMES:
            if all((layer[0], name, n) in apart for name in names for n in numbers):
                found[path] = [
                    (apart[layer[0], name, n], [f"{path}.{place.format(n)}"])
                    for n in numbers
                    for name, place in zip(names, ("gate_up.{}.0", "gate_up.{}.1", "down.{}"), strict=True)
                ]
    return found


def _named(model: PreTrainedModel, tensors: Checkpoint, name: str) -> SlicedTensor | QuantizedTensor | None:
    """Returns a tensor of the checkpoint by its name in the model; files may leave out the name of the base model, or
    have it where the model has not.
    """
    prefix = f"{model.base_model_prefix}."
    return tensors.get(name) or tensors.get(name.removeprefix(prefix)) or tensors.get(prefix + name)


def _untie_quantized(model: PreTrainedModel) -> None:
    """Excludes layers with quantised weights from the weights that `transformers` ties."""
    modules = model.named_modules()
    quantized = {
        f"{path}.weight" for path, module in modules if isinstance(module, QuantizedLinear | QuantizedEmbedding)
    }
    if quantized:
        tied = model.all_tied_weights_keys.items()
        model.all_tied_weights_keys = {name: other for name, other in tied if not {name, other} & quantized}


def _check_shape(folder: Path, tensor: QuantizedTensor, layers: list[Any]) -> None:
    """Raises InvalidWeights for a tensor that is not of the shape that the layers have which it fills."""
    wanted = (layers[0].out_features, layers[0].in_features)
    if tensor.stacked:
        wanted = (len(layers), *reversed(wanted))
    if tensor.shape != wanted:
        raise InvalidWeights(
            f"{folder}: the tensors of {tensor.name} are of the shape {list(tensor.shape)}, where config.json requires "
            f"{list(wanted)}"
        )
