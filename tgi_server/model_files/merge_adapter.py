"""Merges an adapter into its base model, into a complete model folder."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tgi_server.engine.checkpoint.fill import by_model_names
from tgi_server.engine.checkpoint.weight_files import tensor_infos, weight_files, write_index
from tgi_server.engine.errors import InvalidAdapter
from tgi_server.engine.lora.adapter import AdapterLayer
from tgi_server.engine.lora.base_model import BaseModel

# Layers of an adapter, by their paths in the base model.
Layers = Mapping[str, AdapterLayer]


def merge_adapter(adapter: Layers, base: BaseModel, target: Path) -> None:
    """Writes the weights of the base model, changed by the adapter, into a folder that has all else of the base model.

    Of the base model, one file is in memory at a time. The folder's config.json is changed where it has to differ.
    Raises InvalidAdapter for a base model that is quantized, and for a change that its files cannot express.
    """
    if base.quantization is not None:
        raise InvalidAdapter(
            f"{base.folder} is quantized as {base.quantization.text}: an adapter cannot be merged into it; serve the "
            "adapter beside it with --lora-adapters, or name the model that it was made of as the base"
        )
    files = weight_files(base.folder)
    names = by_model_names(base.changes, {name: name for file in files for name in tensor_infos(file)})
    untied = {path: layer for path, layer in adapter.items() if path in base.tied}
    if untied and not base.may_untie:
        raise InvalidAdapter(
            f"the adapter changes {next(iter(untied))}, which shares its weight with the embeddings, and a model of "
            "this architecture cannot separate them; serve the adapter with --lora-adapters"
        )
    stored = {_stored_name(base, path, layer, names): path for path, layer in adapter.items() if path not in untied}
    for number, file in enumerate(files):
        tensors = load_file(file)
        for path in untied:  # which a file may have beside that of the embeddings
            tensors.pop(f"{path}.weight", None)
        tensors |= _changed(tensors, stored, adapter, base)
        if number == 0:
            tensors |= _heads(untied, base)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / file.name, {"format": "pt"})
    write_index(target)
    if untied:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))


def _stored_name(base: BaseModel, path: str, layer: AdapterLayer, names: Mapping[str, str]) -> str:
    """Returns the name of a layer in the files. Raises InvalidAdapter.

    names: maps the tensors' names, in the files and in the model, to their names in the files.
    """
    weight = next((names[f"{name}.weight"] for name in base.names(path) if f"{name}.weight" in names), None)
    if weight is None:
        raise InvalidAdapter(f"the files in {base.folder} have no weight of {path} under that name")
    name = weight.removesuffix(".weight")
    if layer.bias_delta is not None and f"{name}.bias" not in names:
        raise InvalidAdapter(f"the adapter adds a bias to {path}, which has none in {base.folder}")
    return name


def _changed(
    tensors: Mapping[str, Tensor], stored: Mapping[str, str], adapter: Layers, base: BaseModel
) -> dict[str, Tensor]:
    """Returns the tensors of one file that the adapter changes. A weight and its bias may be in two files."""
    changed = {}
    for name, path in stored.items():
        layer = adapter[path]
        if (weight := tensors.get(f"{name}.weight")) is not None:
            transposed = base.layers[path].transposed
            new, _ = layer.merged(weight.T if transposed else weight, None)
            changed[f"{name}.weight"] = (new.T if transposed else new).to(weight.dtype)
        if (bias := tensors.get(f"{name}.bias")) is not None:
            changed[f"{name}.bias"] = layer.merged_bias(bias).to(bias.dtype)
    return changed


def _heads(untied: Layers, base: BaseModel) -> dict[str, Tensor]:
    """Returns the heads that shared their weight with the embeddings until now."""
    heads = {}
    with base.weights() as weights:
        for path, layer in untied.items():
            stored = weights.stored(path)
            assert stored is not None
            heads[f"{path}.weight"] = layer.merged(stored, None)[0].to(stored.dtype)
    return heads
