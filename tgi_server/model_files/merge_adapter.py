"""Merges an adapter into its base model: a model's folder like any other."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from tgi_server.engine.checkpoint.weight_files import tensor_infos, weight_files, write_index
from tgi_server.engine.errors import InvalidAdapter
from tgi_server.engine.lora.adapter import AdapterLayer
from tgi_server.engine.lora.base_model import BaseModel


def merge_adapter(adapter: Mapping[str, AdapterLayer], base: BaseModel, target: Path) -> None:
    """Writes the weights of the base model, changed by the adapter, into a folder that has all else of the base model.

    Of the base model, one file is in memory at a time. The folder's config.json is changed where it has to differ.
    Raises InvalidAdapter for a base model that is quantised, and for a change that its files cannot express.
    """
    if base.quantization is not None:
        raise InvalidAdapter(
            f"{base.folder} is quantised as {base.quantization.text}: an adapter cannot be merged into it; serve the "
            "adapter beside it with --lora-adapters, or name the model that it was made of as the base"
        )
    files = weight_files(base.folder)
    names = {name for file in files for name in tensor_infos(file)}
    merger = _Merger(adapter, base, names)
    for number, file in enumerate(files):
        merged = merger.merged(load_file(file))
        if number == 0:
            merged |= merger.untied()
        save_file({name: tensor.contiguous() for name, tensor in merged.items()}, target / file.name, {"format": "pt"})
    write_index(target)
    if merger.unties:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))


class _Merger:
    """Changes the tensors of a checkpoint. names: of all its tensors."""

    def __init__(self, adapter: Mapping[str, AdapterLayer], base: BaseModel, names: set[str]) -> None:
        self._base = base
        self._layers: dict[str, tuple[str, AdapterLayer]] = {}  # by the name of the tensor, without `.weight`
        self.unties: dict[str, AdapterLayer] = {}  # heads that get a weight of their own
        for path, layer in adapter.items():
            self._place(path, layer, names)

    def _place(self, path: str, layer: AdapterLayer, names: set[str]) -> None:
        base = self._base
        if path in base.tied and not base.may_untie:
            raise InvalidAdapter(
                f"the adapter changes {path}, which shares its weight with the embeddings, and a model of this "
                "architecture cannot have them apart; serve the adapter with --lora-adapters"
            )
        if path in base.tied:
            self.unties[path] = layer
            return
        name = next((each for each in base.names(path) if f"{each}.weight" in names), None)
        if name is None:
            raise InvalidAdapter(f"the files in {base.folder} have no weight of {path} under that name")
        if layer.bias_delta is not None and f"{name}.bias" not in names:
            raise InvalidAdapter(f"the adapter adds a bias to {path}, which has none in {base.folder}")
        self._layers[name] = (path, layer)

    def merged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of one file, changed. A weight and its bias may be in two files."""
        changed = {name: tensor for name, tensor in tensors.items() if self._stays(name)}
        for name, (path, layer) in self._layers.items():
            if (weight := tensors.get(f"{name}.weight")) is not None:
                transposed = self._base.layers[path].transposed
                new, _ = layer.merged(weight.T if transposed else weight, None)
                changed[f"{name}.weight"] = (new.T if transposed else new).to(weight.dtype)
            if (bias := tensors.get(f"{name}.bias")) is not None:
                changed[f"{name}.bias"] = layer.merged_bias(bias).to(bias.dtype)
        return changed

    def untied(self) -> dict[str, Tensor]:
        """Returns the heads that shared their weight with the embeddings until now."""
        heads = {}
        with self._base.weights() as weights:
            for path, layer in self.unties.items():
                stored = weights.stored(path)
                assert stored is not None
                heads[f"{path}.weight"] = layer.merged(stored, None)[0].to(stored.dtype)
        return heads

    def _stays(self, name: str) -> bool:
        """Returns False for the weight of a tied head, which a file may have beside that of the embeddings."""
        return name.removesuffix(".weight") not in self.unties
