"""Copies of models in the hub's cache: converted from a read-only folder, or merged from several folders."""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants

# Files that belong to a model beside its weights.
TEMPLATES = "*.jinja"
METADATA = ["*.json", TEMPLATES, "*.model", "*.txt", "*.tiktoken"]
CODE = ["*.py"]

# Of the modules of sentence-transformers.
MODULES = "[0-9]_*/*"

# Files that say in which file a weight is.
INDEXES = ("pytorch_model.bin.index.json", "model.safetensors.index.json")
MEDUSA_FILE = "medusa_lm_head.pt"


def storage_hint(error: BaseException | None, folder: str) -> str:
    """Returns advice if this user may not write to the folder, or its disk is full; "" for other errors."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"; free space on the disk of {folder}, or let HF_HUB_CACHE name a folder on another one"
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        return ""
    return (
        f"; run `sudo chown -R {os.getuid()}:{os.getgid()} {folder}`, "
        "or on the host if the folder is a volume of a container"
    )


def copy_path(kind: str, *folders: Path) -> Path:
    """Returns the folder of the copy of a kind made from some folders. Its name depends on their files."""
    return files_path(
        kind, folders[0].resolve().name, [file for folder in folders for file in sorted(folder.iterdir())]
    )


def files_path(kind: str, name: str, files: Iterable[Path], code: bytes = b"") -> Path:
    """Returns the folder of a copy that is made from some files. Its name begins with `name`.

    code: identifies the version of the code that makes the copy. Each version makes its own copy.
    """
    made_of = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    digest = hashlib.sha256(repr(made_of).encode() + code).hexdigest()
    return Path(constants.HF_HUB_CACHE) / kind / f"{name}-{digest[:16]}"


@contextmanager
def unfinished_copy(folder: Path, copy: Path) -> Iterator[Path]:
    """Yields a folder with all files of a model but its weights; it becomes the copy at the end. Raises OSError."""
    patterns = (*METADATA, *CODE, f"*/{TEMPLATES}", MODULES)
    with unfinished_folder(copy) as whole:
        for file in (file for pattern in patterns for file in folder.glob(pattern)):
            if file.name not in INDEXES:
                target = whole / file.relative_to(folder)
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(file, target)
        yield whole


@contextmanager
def unfinished_folder(copy: Path) -> Iterator[Path]:
    """Yields an empty folder, which becomes the copy at the end. Raises OSError."""
    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=copy.parent, prefix="unfinished-") as scratch:
        whole = Path(scratch) / "model"
        whole.mkdir()
        yield whole
        try:
            whole.rename(copy)
        except OSError:
            if not copy.is_dir():  # or another process has made the same copy meanwhile
                raise
