"""Converts the `.bin` weights that older models are published with, and Medusa's `.pt` ones, to safetensors."""

import logging
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from tgi_server.engine.checkpoint.pickled import load_pickled
from tgi_server.engine.checkpoint.weight_files import index_names, named_files, write_index
from tgi_server.engine.errors import EngineError
from tgi_server.model_files.copies import MEDUSA_FILE
from tgi_server.model_files.errors import ModelUnavailable

logger = logging.getLogger(__name__)

SINGLE_FILE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"


def convert_weights(folder: Path, target: Path) -> None:
    """Writes a safetensors file for each pickled file of the model, and the index that several files need.

    The new files are moved to the target once all of them are whole, so an interrupted conversion is never served.
    Raises ModelUnavailable when a file is missing, corrupt, or holds more than tensors, and when the disk is full.
    """
    try:
        sources = _weight_files(folder)
        with TemporaryDirectory(dir=target, prefix=".unfinished-") as unfinished:
            for number, source in enumerate(sources, start=1):
                logger.info("converting %s to safetensors (%d of %d)", source.name, number, len(sources))
                name = Path(source.name.replace("pytorch_model", "model")).with_suffix(".safetensors")
                tensors = _without_shared_memory(load_pickled(source))
                save_file(tensors, Path(unfinished) / name, metadata={"format": "pt"})
            for file in Path(unfinished).iterdir():
                os.replace(file, target / file.name)
        write_index(target)
    except EngineError as error:
        raise ModelUnavailable(str(error)) from error
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(f"{target} cannot be written to: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        return named_files(folder, index_names(folder / INDEX))
    return named_files(folder, [MEDUSA_FILE if (folder / MEDUSA_FILE).is_file() else SINGLE_FILE])


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
