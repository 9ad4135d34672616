"""Models that have `.bin` weights only, in folders that cannot be written to: converted copies in the hub's cache."""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import constants

from tgi_server.shard.errors import ModelUnavailable

logger = logging.getLogger(__name__)

# What belongs to a model beside its weights.
TEMPLATES = "*.jinja"
METADATA = ["*.json", TEMPLATES, "*.model", "*.txt", "*.tiktoken"]
CODE = ["*.py"]

# What says in which file a weight is.
INDEXES = ("pytorch_model.bin.index.json", "model.safetensors.index.json")
MEDUSA_FILE = "medusa_lm_head.pt"


def converted_copy(folder: Path) -> Path | None:
    """Returns the copy of a model's folder that has safetensors weights; None when there is none."""
    copy = copy_path("converted", folder)
    return copy if copy.is_dir() else None


def convert(folder: Path) -> Path:
    """Converts a folder's `.bin` weights to safetensors: there, or in a copy where the folder cannot be written to.

    Returns the folder that has the safetensors weights. Raises ModelUnavailable.
    """
    from tgi_server.shard.pickled_weights import convert_weights  # imports torch, which takes a second

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
            f"in {copy.parent}: {error.strerror}{permission_hint(error, constants.HF_HUB_CACHE)}"
        ) from error
    return copy


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits while another process converts weights in the folder, and has others wait while the context is open."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def permission_hint(error: BaseException | None, folder: str) -> str:
    """Returns what to do when the error is that this user may not write to the folder; "" for other errors."""
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ""
    return (
        f"; run `sudo chown -R {os.getuid()}:{os.getgid()} {folder}`, "
        "with the host's name of the folder where it is a volume of a container"
    )


def copy_path(kind: str, *folders: Path) -> Path:
    """Returns where the copy of a kind is that is made of some folders. The name changes with the files of them."""
    made_of = []
    for folder in folders:
        files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.iterdir())
        made_of.append((str(folder.resolve()), files))
    digest = hashlib.sha256(repr(made_of).encode()).hexdigest()
    return Path(constants.HF_HUB_CACHE) / kind / f"{folders[0].resolve().name}-{digest[:16]}"


@contextmanager
def unfinished_copy(folder: Path, copy: Path) -> Iterator[Path]:
    """Yields a folder with all of a model but its weights, which becomes the copy once it has those. Raises OSError."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=copy.parent, prefix="unfinished-") as scratch:
        whole = Path(scratch) / "model"
        whole.mkdir()
        for file in (file for pattern in (*METADATA, *CODE, f"*/{TEMPLATES}") for file in folder.glob(pattern)):
            if file.name not in INDEXES:
                target = whole / file.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
        yield whole
        try:
            whole.rename(copy)
        except OSError:
            if not copy.is_dir():  # or another process has made the same copy meanwhile
                raise
