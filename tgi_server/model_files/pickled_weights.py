"""Converts the `.bin` weights that older models are published with, and Medusa's `.pt` ones, to safetensors."""

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tgi_server.engine.checkpoint.pickled import load_pickled
from tgi_server.engine.errors import InvalidWeights
from tgi_server.model_files.copies import MEDUSA_FILE
from tgi_server.model_files.errors import ModelUnavailable

logger = logging.getLogger(__name__)

SINGLE_FILE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
NEW_INDEX = "model.safetensors.index.json"


def convert_weights(folder: Path, target_folder: Path) -> None:
    """Writes a safetensors file for each pickled file of the model, and the index that several files need.

    The new files get their names once all of them are whole, so an interrupted conversion is never served.
    Raises ModelUnavailable when a file is missing, corrupt, or holds more than tensors, and when the disk is full.
    """
    sources = _weight_files(folder)
    locations: dict[str, str] = {}
    total_bytes = 0
    with _unfinished_files() as unfinished:
        for number, source in enumerate(sources, start=1):
            logger.info("converting %s to safetensors (%d of %d)", source.name, number, len(sources))
            tensors = _without_shared_memory(_loaded(source))
            target = target_folder / Path(source.name.replace("pytorch_model", "model")).with_suffix(".safetensors")
            unfinished[target] = target.with_suffix(".partial")
            _write(tensors, unfinished[target])
            locations |= dict.fromkeys(tensors, target.name)
            total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        for target, partial in unfinished.items():
            os.replace(partial, target)
    if len(sources) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": locations}
        (target_folder / NEW_INDEX).write_text(json.dumps(index, indent=2, sort_keys=True))


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    names = [MEDUSA_FILE if (folder / MEDUSA_FILE).is_file() else SINGLE_FILE]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelUnavailable(f"{index} is not an index of weight files; download it again") from error
    for name in names:
        if Path(name).name != name:
            raise ModelUnavailable(f"{index} names {name!r}, which is not a file of its folder; it is not loaded")
        if not (folder / name).is_file():
            raise ModelUnavailable(f"{folder} has no {name}; is the download complete?")
    return [folder / name for name in names]


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_pickled(path)
    except InvalidWeights as error:
        raise ModelUnavailable(str(error)) from error


def _without_shared_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors contiguous, each with memory of its own: safetensors cannot say that two are the same."""
    seen: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        alone = storage.data_ptr() not in seen and storage.nbytes() == tensor.nbytes
        seen.add(storage.data_ptr())
        separate[name] = tensor.contiguous() if alone else tensor.clone(memory_format=torch.contiguous_format)
    return separate


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(f"{path.parent} cannot be written to: {error}") from error


@contextmanager
def _unfinished_files() -> Iterator[dict[Path, Path]]:
    """Gives a table from final names to temporary ones; files left under a temporary name are deleted at the end."""
    files: dict[Path, Path] = {}
    try:
        yield files
    finally:
        for partial in files.values():
            partial.unlink(missing_ok=True)
