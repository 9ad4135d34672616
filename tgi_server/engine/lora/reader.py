"""Reads an adapter in the format of `peft` or llama.cpp, and checks its tensors against the base model."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.reader import read_tensors
from tgi_server.engine.errors import InvalidAdapter, InvalidWeights
from tgi_server.engine.lora.adapter import AdapterLayer
from tgi_server.engine.lora.base_model import BaseLayer, BaseModel, BaseWeights
from tgi_server.engine.lora.gguf_adapter import read_gguf
from tgi_server.engine.lora.peft_config import MAX_RANK, PeftConfig
from tgi_server.gguf.paths import GgufError, adapter_file

WEIGHTS = "adapter_model.safetensors"
PICKLED_WEIGHTS = "adapter_model.bin"

# Layers that some models have as one, and others as several layers.
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

# base_model.model.PATH.lora_A.weight and so on. The adapter's name, `default`, may follow lora_A.
_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<path>.+?)\.(?:"
    r"lora_(?P<matrix>[AB])(?:\.default)?\.(?P<of>weight|bias)|"
    r"(?P<magnitude>lora_magnitude_vector)(?:\.default)?(?:\.weight)?|"
    r"(?:base_layer\.)?(?P<bias>bias))"
)
# A weight of the base model, which peft saves together with an adapter of the head.
_COPY = re.compile(r"(?:base_model\.model\.)?(?P<path>.+?)(?:\.base_layer)?\.weight")

# Names of a layer's tensors in the file, by their kind, such as A.weight.
Parts = dict[str, str]


def read_adapter(folder: Path, base: BaseModel, *, max_rank: int = MAX_RANK) -> dict[str, AdapterLayer]:
    """Returns the layers of an adapter, by their paths in the base model, in float32.

    folder: a folder with the files of `peft`, a folder with a GGUF file, or a GGUF file.

    Raises InvalidAdapter, which names the setting or tensor that is not supported or does not fit the base model.
    """
    try:
        file = adapter_file(folder)
    except GgufError as error:
        raise InvalidAdapter(str(error)) from error
    config, tensors = (PeftConfig.of(folder), _tensors(folder)) if file is None else read_gguf(file, base)
    _check_numbers(folder, tensors)
    with base.weights() as weights:
        reader = _Reader(folder, config, base, tensors, weights, max_rank)
        layers: dict[str, AdapterLayer] = {}
        for path, parts in reader.parts().items():
            for place, layer in reader.layers(path, parts).items():
                if place in layers:
                    raise InvalidAdapter(f"{folder}: tensor {_first(parts)} changes {place} a second time")
                layers[place] = layer
    return layers


def _tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    try:
        tensors = read_tensors(file if file.is_file() else folder / PICKLED_WEIGHTS)
    except FileNotFoundError as error:
        raise InvalidAdapter(f"{folder} has neither {WEIGHTS} nor {PICKLED_WEIGHTS}") from error
    except InvalidWeights as error:
        raise InvalidAdapter(str(error)) from error
    if not any(map(_NAME.fullmatch, tensors)):
        raise InvalidAdapter(f"{folder}: the adapter's file has no tensor of a LoRA")
    return tensors


def _check_numbers(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InvalidAdapter(f"{folder}: tensor {name} has the dtype {tensor.dtype}; it must be of floats")
        # Minimum and maximum show if numbers are not finite, and need no memory.
        if tensor.numel() and not torch.stack(tensor.float().aminmax()).isfinite().all():
            raise InvalidAdapter(f"{folder}: tensor {name} has numbers that are not finite; train the adapter again")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Converts the tensors of one adapter to layers."""

    folder: Path
    config: PeftConfig
    base: BaseModel
    tensors: Mapping[str, Tensor]
    weights: BaseWeights
    max_rank: int

    def parts(self) -> dict[str, Parts]:
        """Returns the names of the tensors of each layer, by the layer's path in the adapter's model."""
        layers: dict[str, Parts] = defaultdict(dict)
        for name in self.tensors:
            match = _NAME.fullmatch(name)
            if match is None:
                self._check_copy(name)
                continue
            matrix, of = match["matrix"], match["of"]
            kind = f"{matrix}.{of}" if matrix else match["magnitude"] or match["bias"]
            layers[match["path"]][kind] = name
        return layers

    def layers(self, path: str, parts: Parts) -> dict[str, AdapterLayer]:
        """Returns the layers of the base model, by path, that one layer of the adapter changes.

        path, parts: path of the adapter's layer, and its tensors.
        """
        places = self._places(path, parts)
        outputs = sum(layer.out_features for layer in places.values())
        inputs = next(iter(places.values())).in_features
        for kind in ("A.weight", "B.weight"):
            if kind not in parts:
                self._refuse(_first(parts), f"has no lora_{kind} beside it")
        rank = self._rank(path, parts)
        a = self._tensor(parts["A.weight"], rank, inputs)
        b = self._tensor(parts["B.weight"], outputs, rank)
        if (scale := self.config.scale(path)) != 1:
            b = b * scale
        bias_delta = dora_scale = None
        if (name := parts.get("B.bias")) is not None:
            bias_delta = self._tensor(name, outputs) * scale
        if (name := parts.get("bias")) is not None:
            bias_delta = self._trained_bias(name, places, outputs)
        if (name := parts.get("lora_magnitude_vector")) is not None:
            dora_scale = self._dora_scale(self._tensor(name, outputs), a, b, places)
            b = b * dora_scale.unsqueeze(1)
            if "B.bias" in parts:
                self._refuse(parts["B.bias"], "is a bias of a LoRA with DoRA, which is not supported")
            old = self._bias(places)
            if old is not None:  # the magnitude scales the output without the bias
                bias_delta = (1 - dora_scale) * old if bias_delta is None else bias_delta + (1 - dora_scale) * old
        elif self.config.dora:
            self._refuse(_first(parts), "has no lora_magnitude_vector beside it, which use_dora asks for")
        return AdapterLayer(a, b, dora_scale, bias_delta).split(places)

    def _check_copy(self, name: str) -> None:
        """Refuses a tensor that is neither part of a LoRA nor a copy of the base model's tensor."""
        match = _COPY.fullmatch(name)
        stored = map(self.weights.stored, self.base.paths(match["path"]) if match else ())
        own = next((tensor for tensor in stored if tensor is not None), None)
        if own is None:
            self._refuse(
                name,
                "is not of a LoRA of a linear layer; adapters of embeddings and of other modules are not supported",
            )
        found = self.tensors[name]
        if found.shape != own.shape:
            self._refuse(
                name,
                f"has the shape {list(found.shape)}, the base model's is {list(own.shape)}: adapters that change the "
                "vocabulary are not supported",
            )
        if not (torch.equal(found.to(own.dtype), own) or torch.equal(own.to(found.dtype), found)):
            self._refuse(name, "differs from the base model's; adapters that change whole weights are not supported")

    def _places(self, path: str, parts: Parts) -> dict[str, BaseLayer]:
        """Returns the layers of the base model, by path, that a layer of the adapter is for: one, or several joined."""
        known = self.base.layers
        for place in self.base.paths(path):
            if place in known:
                return {place: known[place]}
            parent, _, name = place.rpartition(".")
            paths = [f"{parent}.{part}" for part in _JOINED.get(name, ())]
            if paths and all(path in known for path in paths):
                return {path: known[path] for path in paths}
        return self._refuse(_first(parts), f"is for {path}, which is not a linear layer of the base model")

    def _rank(self, path: str, parts: Parts) -> int:
        name = parts["A.weight"]
        rank = len(self.tensors[name])
        if not 1 <= rank <= self.max_rank:
            self._refuse(name, f"has the rank {rank}; it must be from 1 to {self.max_rank}")
        if rank != (said := self.config.rank_of(path)):
            self._refuse(name, f"has the rank {rank}, where adapter_config.json says {said}")
        return rank

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            self._refuse(name, f"has the shape {list(tensor.shape)}, where the base model's layer needs {list(shape)}")
        return tensor.float()

    def _trained_bias(self, name: str, places: Mapping[str, BaseLayer], outputs: int) -> Tensor | None:
        """Returns the bias delta; None for a copy of the base model's bias, which peft saves beside a head."""
        old = self._bias(places)
        if not self.config.biases:
            if old is not None and torch.equal(self._tensor(name, outputs), old):
                return None
            self._refuse(name, "is a bias, where adapter_config.json does not say bias='lora_only'")
        if old is None:
            self._refuse(name, "is a bias of a layer that has none in the base model")
        return self._tensor(name, outputs) - old

    def _bias(self, places: Mapping[str, BaseLayer]) -> Tensor | None:
        biases = [(self.weights.bias(path), layer.out_features) for path, layer in places.items()]
        if all(bias is None for bias, _ in biases):
            return None
        return torch.cat([torch.zeros(size) if bias is None else bias for bias, size in biases])

    def _dora_scale(self, magnitude: Tensor, a: Tensor, b: Tensor, places: Mapping[str, BaseLayer]) -> Tensor:
        """Returns the magnitude divided by the row norms of the changed weight, W + b a."""
        weight = torch.cat([self.weights.weight(path) for path in places])
        norms = torch.linalg.norm(torch.addmm(weight, b, a), dim=1)
        return magnitude / norms.clamp_min(torch.finfo(norms.dtype).tiny)  # rows of padding may be all zeros

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise InvalidAdapter(f"{self.folder}: tensor {name} {why}")


def _first(parts: Parts) -> str:
    return min(parts.values())
