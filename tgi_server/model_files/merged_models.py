"""Models whose folder is that of an adapter: copies of the base model in the hub's cache, with the adapter merged."""

import json
import logging
from pathlib import Path

from huggingface_hub import constants

from tgi_server.model_files.copies import copy_path, storage_hint, unfinished_copy
from tgi_server.model_files.errors import ModelUnavailable

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
# Beginning of the names of an adapter's weights.
WEIGHTS = "adapter_model"


def is_adapter(folder: Path) -> bool:
    """Returns True for the folder of an adapter that has no weights of a model beside it."""
    weights = (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"))
    return (folder / CONFIG).is_file() and all(file.name.startswith(WEIGHTS) for file in weights)


def base_of(folder: Path) -> tuple[str, str | None]:
    """Returns the model that an adapter was trained on, a folder or an id of the hub, and its revision.

    Raises ModelUnavailable if the adapter does not say.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        base, revision = config["base_model_name_or_path"], config.get("revision")
    except (ValueError, KeyError, TypeError) as error:
        raise ModelUnavailable(f"{folder / CONFIG} is not as peft writes it; download the adapter again") from error
    if not base or not isinstance(base, str) or not (revision is None or isinstance(revision, str)):
        raise ModelUnavailable(
            f"{folder / CONFIG} does not say which model the adapter is for (base_model_name_or_path); serve that "
            "model with --lora-adapters"
        )
    return base, revision


def merged_copy(adapter: Path, base: Path) -> Path | None:
    """Returns the copy of the base model that has the adapter merged; None when there is none."""
    copy = copy_path("merged", adapter, base)
    return copy if copy.is_dir() else None


def merge(adapter: Path, base: Path, *, trust_remote_code: bool) -> Path:
    """Returns the base model with the adapter merged, and makes it if it does not exist. Raises ModelUnavailable."""
    if (copy := merged_copy(adapter, base)) is not None:
        return copy
    from tgi_server.engine.checkpoint.model_folder import ModelFolder  # imports torch, which takes seconds
    from tgi_server.engine.errors import EngineError
    from tgi_server.engine.lora import BaseModel, read_adapter
    from tgi_server.model_files.merge_adapter import merge_adapter

    copy = copy_path("merged", adapter, base)
    logger.info("merging the adapter %s into %s", adapter, base)
    try:
        folder = ModelFolder.read(base, trust_remote_code=trust_remote_code)
        model = BaseModel.of(base, folder.model, trust_remote_code=trust_remote_code)
        change = read_adapter(adapter, model)
        with unfinished_copy(base, copy) as whole:
            merge_adapter(change, model, whole)
    except EngineError as error:
        raise ModelUnavailable(str(error)) from error
    except OSError as error:
        raise ModelUnavailable(
            f"{base} with the adapter {adapter} cannot be written to {copy.parent}: {error.strerror}"
            f"{storage_hint(error, constants.HF_HUB_CACHE)}"
        ) from error
    return copy
