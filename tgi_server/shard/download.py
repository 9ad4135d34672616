"""Finds a model's folder: a local one, or one in the Hugging Face hub's cache, fetched if need be.

The hub's client itself reads the variables HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT, HF_HUB_CACHE, and those of proxies.
"""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    HTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    XetDownloadError,
)

from tgi_server.shard.converted_models import CODE, METADATA, convert, converted_copy, permission_hint
from tgi_server.shard.errors import ModelUnavailable
from tgi_server.shard.merged_models import base_of, is_adapter, merge, merged_copy

logger = logging.getLogger(__name__)

# Subfolders hold the same weights in other formats.
SUBFOLDERS = ["*/*"]
# Files with the same weights in another layout, and files that training leaves behind.
NOT_THE_MODEL = ["consolidated*", "training_args*", "optimizer*", "scheduler*", "rng_state*", "openvino*"]


def find_model(model_id: str, revision: str | None, *, trust_remote_code: bool = False) -> Path:
    """Returns the model's folder, without using the network. Raises ModelUnavailable if it is not on this machine.

    The folder of an adapter stands for its base model with the adapter merged.
    """
    folder = _local_folder(model_id)
    if folder is None:
        folder = _snapshot(
            model_id, revision, ".safetensors", trust_remote_code=trust_remote_code, local_files_only=True
        )
    if is_adapter(folder):
        base_id, base_revision = base_of(folder)
        merged = merged_copy(folder, _base(find_model, base_id, base_revision, trust_remote_code=trust_remote_code))
        if merged is None:
            raise ModelUnavailable(
                f"{model_id} is an adapter that is not merged into {base_id} yet; run `text-generation-server "
                f"download-weights --merge-lora {model_id}` first"
            )
        return merged
    return folder if _has_weights(folder, ".safetensors") else converted_copy(folder) or folder


def download_model(
    model_id: str,
    revision: str | None,
    *,
    extension: str,
    auto_convert: bool,
    trust_remote_code: bool,
    merge_lora: bool = False,
) -> Path:
    """Returns the model's folder, complete; `.bin` weights are converted if there are no safetensors files.

    Files that are there already are not fetched again. Of an adapter the folder is its own, or with `merge_lora` that
    of its base model with the adapter merged. Raises ModelUnavailable.
    """
    folder = _local_folder(model_id)
    if folder is None:
        folder = _snapshot(model_id, revision, extension, trust_remote_code=trust_remote_code)
        if auto_convert and not _has_weights(folder, ".safetensors"):
            logger.info("%s has no safetensors files; fetching its .bin files", model_id)
            folder = _snapshot(model_id, revision, ".bin", trust_remote_code=trust_remote_code)
    if is_adapter(folder):
        if not any(folder.glob("adapter_model.*")):
            raise ModelUnavailable(f"{model_id} has no adapter_model.safetensors and no adapter_model.bin")
        if not merge_lora:
            return folder
        fetch = partial(download_model, extension=extension, auto_convert=auto_convert)
        base = _base(fetch, *base_of(folder), trust_remote_code=trust_remote_code)
        return merge(folder, base, trust_remote_code=trust_remote_code)
    if auto_convert and not _has_weights(folder, ".safetensors") and _has_weights(folder, ".bin"):
        converted = convert(folder)
        folder = converted if _has_weights(converted, extension) else folder
    if not _has_weights(folder, extension):
        raise ModelUnavailable(f"{model_id} has no *{extension} files; name another model, or another --extension")
    return folder


def _base(find: Callable[..., Path], model_id: str, revision: str | None, *, trust_remote_code: bool) -> Path:
    """Returns the folder of an adapter's base model. Raises ModelUnavailable."""
    path = Path(model_id).expanduser()
    if path.is_dir() and is_adapter(path):
        raise ModelUnavailable(f"the base model {model_id} of the adapter is an adapter itself; merge that one first")
    return find(model_id, revision, trust_remote_code=trust_remote_code)


def _local_folder(model_id: str) -> Path | None:
    """Returns the folder that `model_id` names; None if it is an id of the hub. Raises ModelUnavailable otherwise."""
    path = Path(model_id).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file() and not is_adapter(path):
            raise ModelUnavailable(f"{path} has no config.json; is it a model folder in transformers format?")
        return path
    if path.exists():
        raise ModelUnavailable(f"{path} is a file; give the folder that holds the model")
    if path.is_absolute() or model_id.startswith(".") or model_id.count("/") > 1:
        raise ModelUnavailable(f"there is no model folder {path}")
    return None


def _has_weights(folder: Path, extension: str) -> bool:
    return any(folder.glob(f"*{extension}"))


def _snapshot(
    model_id: str, revision: str | None, extension: str, *, trust_remote_code: bool, local_files_only: bool = False
) -> Path:
    """Returns the folder of one commit in the hub's cache, complete. Raises ModelUnavailable."""
    try:
        folder = snapshot_download(
            model_id,
            revision=revision,
            allow_patterns=[*METADATA, *(CODE if trust_remote_code else ()), f"*{extension}"],
            ignore_patterns=[*SUBFOLDERS, *NOT_THE_MODEL],
            local_files_only=local_files_only,
        )
    except (HFValidationError, HTTPError, OSError, XetDownloadError) as error:
        named = f"{model_id} at revision {revision}" if revision else model_id
        raise ModelUnavailable(_explain(error, named)) from error
    return Path(folder)


def _explain(error: Exception, named: str) -> str:
    match error:
        case HFValidationError():
            return f"{named} is neither a local folder nor an id of the hub; give a folder, or OWNER/NAME"
        case GatedRepoError():
            return f"{named} is gated: ask for access on its page at the hub, then set HF_TOKEN"
        case RevisionNotFoundError():
            return f"the hub has no {named}; see the model's page at the hub for its revisions"
        case RepositoryNotFoundError():
            return f"the hub has no model {named}, and there is no such folder here; for a private model set HF_TOKEN"
        case LocalEntryNotFoundError(__cause__=OfflineModeIsEnabled()):
            return f"{named} is not complete on this machine; unset HF_HUB_OFFLINE to have it fetched"
        case IncompleteSnapshotError() | LocalEntryNotFoundError(__cause__=None):
            return f"{named} is not complete on this machine; run `text-generation-server download-weights` first"
        case LocalEntryNotFoundError():
            return f"{named} is not on this machine, and the hub cannot be reached: {_first_line(error.__cause__)}"
    return f"{named} could not be fetched: {_first_line(error)}{permission_hint(error, constants.HF_HUB_CACHE)}"


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
