"""Models that have `.bin` weights only, in folders that cannot be written to: converted copies in the hub's cache."""

import errno
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import constants

from tgi_server.shard.errors import ModelUnavailable

logger = logging.getLogger(__name__)

# What belongs to a model beside its weights.
METADATA = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
CODE = ["*.py"]

BIN_INDEX = "pytorch_model.bin.index.json"
MEDUSA_FILE = "medusa_lm_head.pt"


def converted_copy(folder: Path) -> Path | None:
    """Returns the copy of a model's folder that has safetensors weights; None when there is none."""
    copy = _path(folder)
    return copy if copy.is_dir() else None


def convert(folder: Path) -> Path:
    """Converts a folder's `.bin` weights to safetensors: there, or in a copy where the folder cannot be written to.

    Returns the folder that has the safetensors weights. Raises ModelUnavailable.
    """
    from tgi_server.shard.pickled_weights import convert_weights  # imports torch, which takes a second

    if os.access(folder, os.W_OK):
        convert_weights(folder, folder)
        return folder
    if (copy := converted_copy(folder)) is not None:
        return copy
    copy = _path(folder)
    logger.info("%s cannot be written to, so its weights are converted into %s", folder, copy)
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=copy.parent, prefix="unfinished-") as scratch:
            whole = Path(scratch) / "model"
            whole.mkdir()
            for file in (file for pattern in (*METADATA, *CODE) for file in folder.glob(pattern)):
                if file.name != BIN_INDEX:
                    shutil.copyfile(file, whole / file.name)
            convert_weights(folder, whole)
            whole.rename(copy)
    except OSError as error:
        raise ModelUnavailable(
            f"{folder} has .bin weights only, and cannot be written to; a copy with safetensors weights cannot be made "
            f"in {copy.parent}: {error.strerror}{permission_hint(error, constants.HF_HUB_CACHE)}"
        ) from error
    return copy


def permission_hint(error: BaseException | None, folder: str) -> str:
    """Returns what to do when the error is that this user may not write to the folder; "" for other errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ""
    return (
        f"; run `sudo chown -R {os.getuid()}:{os.getgid()} {folder}`, "
        "with the host's name of the folder where it is a volume of a container"
    )


def _path(folder: Path) -> Path:
    """Returns where the copy is. The name changes with the files of the folder."""
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())
    digest = hashlib.sha256(repr((str(folder.resolve()), files)).encode()).hexdigest()
    return Path(constants.HF_HUB_CACHE) / "converted" / f"{folder.resolve().name}-{digest[:16]}"
