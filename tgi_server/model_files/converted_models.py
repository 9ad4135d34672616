"""Converted copies, in the hub's cache, of models that have only `.bin` weights in a read-only folder."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import constants

from tgi_server.model_files.copies import copy_path, storage_hint, unfinished_copy
from tgi_server.model_files.errors import ModelUnavailable

logger = logging.getLogger(__name__)


def converted_copy(folder: Path) -> Path | None:
    """Returns the copy of a model's folder that has safetensors weights; None when there is none."""
    copy = copy_path("converted", folder)
    return copy if copy.is_dir() else None


def convert(folder: Path) -> Path:
    """Converts a folder's `.bin` weights to safetensors: there, or in a copy if the folder is read-only.

    Returns the folder that has the safetensors weights. Raises ModelUnavailable.
    """
    from tgi_server.model_files.pickled_weights import convert_weights  # imports torch, which takes a second

    if os.access(folder, os.W_OK):
        with _alone_in(folder):
            if not any(folder.glob("*.safetensors")):  # which another process may have written meanwhile
                convert_weights(folder, folder)
        return folder
    if (copy := converted_copy(folder)) is not None:
        return copy
    copy = copy_path("converted", folder)
    logger.info("%s cannot be written to, so its weights are converted into %s", folder, copy)
    try:
        with unfinished_copy(folder, copy) as whole:
            convert_weights(folder, whole)
    except OSError as error:
        raise ModelUnavailable(
            f"{folder} has .bin weights only, and cannot be written to; a copy with safetensors weights cannot be made "
            f"in {copy.parent}: {error.strerror}{storage_hint(error, constants.HF_HUB_CACHE)}"
        ) from error
    return copy


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Locks the folder, so that only one process at a time converts weights in it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
