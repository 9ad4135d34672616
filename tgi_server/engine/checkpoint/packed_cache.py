"""Stores models as they are packed for this machine's CPU, so that the next start neither converts nor proves them.

A file is what `torch.save` writes: an archive with a checksum of each part. Its name has two digests: of the settings,
and of what else its content depends on, which is the model's files, this package, its kernels and its libraries.
"""

import hashlib
import logging
import mmap
import os
import pickle
import platform
import struct
import tempfile
import time
import zipfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from shared.control_groups import usable_cores
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.kernels import compiled_library, load_kernels
from tgi_server.engine.memory import forget_file
from tgi_server.engine.parallel import ShardGroup

logger = logging.getLogger(__name__)

# Settings that do not change what is stored.
_OTHER_SETTINGS = {
    *("group", "packed_cache", "memory_fraction", "cpu_memory", "cuda_graphs", "image_memory", "max_lora_rank"),
    *("speculate", "speculative_model", "watermark_gamma", "watermark_delta"),
}
# Files in the folder, at most: those that were used last.
_MOST_FILES = 8
_UNFINISHED, _DAY = ".unfinished", 86400
_PACKAGE = Path(__file__).parents[2]
# The shards of the model that is being read.
_group: ContextVar[ShardGroup | None] = ContextVar("group", default=None)


def packed_file(config: EngineConfig) -> Path | None:
    """Returns where the packed model is stored, or this shard of it; None where models are not stored.

    They are stored on CPUs that have kernels, except for models with Python code of their own.
    """
    if config.packed_cache is None or config.trust_remote_code or not config.custom_kernels:
        return None
    if not config.model_path.is_dir():  # which loading says
        return None
    if config.resolve_device().type != "cpu" or not load_kernels() or (library := compiled_library()) is None:
        return None
    group = config.group
    settings = [(each.name, str(getattr(config, each.name))) for each in fields(config)]
    place = _digest(
        [each for each in settings if each[0] not in _OTHER_SETTINGS], group and (group.rank, group.world_size)
    )
    state = _digest(
        [(file.name, status.st_size, status.st_mtime_ns) for file, status in _files(config.model_path)],
        [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(_PACKAGE.rglob("*.py"))],
        (library.name, torch.__version__, transformers.__version__, platform.python_version()),
    )
    return config.packed_cache / f"{config.model_path.name}-{place}-{state}.pt"


def read_packed(path: Path | None, group: ShardGroup | None) -> Any:
    """Returns what `write_packed` wrote; None if nothing was written there, or a file that cannot be used.

    path: None: there is none. group: the shards of the model, when this is one of them. All of them have to call this,
    and all get something, or none does.
    """
    token = _group.set(group)
    try:
        content = None if path is None else _read(path)
    finally:
        _group.reset(token)
    of_all = group is None or group.minimum(int(content is not None))
    return content if of_all else None


def write_packed(path: Path, content: Any) -> None:
    """Writes a model for later starts. Where that is impossible the reason is in the log."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(suffix=_UNFINISHED, dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                torch.save(content, file, pickle_module=SimpleNamespace(__name__=__name__, Pickler=_Pickler))
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
        with suppress(FileNotFoundError):  # another shard may do the same
            _delete_old(path)
    except (OSError, RuntimeError, pickle.PicklingError, TypeError, AttributeError) as error:
        logger.info("packed weights are not stored in %s: %s", path.parent, error)
    else:
        logger.info("packed weights are stored in %s for later starts", path)


def _read(path: Path) -> Any:
    try:
        _check(path)
        content = torch.load(path, weights_only=False, mmap=True)
        forget_file(path)  # packed weights were copied into huge pages
        os.utime(path)
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a damaged file leads to
        logger.warning("%s cannot be used, so the model is packed anew: %s", path, error)
        return None
    logger.info("packed weights come from %s", path)
    return content


def _delete_old(path: Path) -> None:
    """Deletes earlier states of the same model, files that were not used lately, and those that nobody finished."""
    files = {file: file.stat().st_mtime for file in path.parent.iterdir() if file != path}
    place, _, _ = path.name.rpartition("-")
    models = sorted((file for file in files if file.suffix == ".pt"), key=files.__getitem__)
    earlier = [file for file in models if file.name.rpartition("-")[0] == place]
    broken = [file for file in files if file.suffix == _UNFINISHED and files[file] < time.time() - _DAY]
    for file in {*models[: 1 - _MOST_FILES], *earlier, *broken}:
        file.unlink()


def _group_of_reader() -> ShardGroup | None:
    return _group.get()


class _Pickler(pickle.Pickler):
    """Writes a tensor that lies in a larger one, or in a file, without the rest; and no shards, which meet anew."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ShardGroup):
            return _group_of_reader, ()
        if not isinstance(value, Tensor) or value.untyped_storage().nbytes() <= value.nbytes:
            return NotImplemented
        own: Tensor = value.detach().clone()
        return (nn.Parameter(own, requires_grad=False) if isinstance(value, nn.Parameter) else own).__reduce_ex__(2)


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    return [(file, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]


def _check(path: Path) -> None:
    """Raises OSError or BadZipFile for a file that other users may have written, or that is damaged."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError("other users may have written it; delete it")

    def is_damaged(part: zipfile.ZipInfo) -> bool:
        name, extra = struct.unpack_from("<HH", content, part.header_offset + 26)  # bytes in front of the part
        start = part.header_offset + 30 + name + extra
        return zlib.crc32(content[start : start + part.file_size]) != part.CRC

    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        memoryview(mapped) as content,
        zipfile.ZipFile(file) as archive,
        ThreadPoolExecutor(usable_cores()) as threads,
    ):
        if any(threads.map(is_damaged, archive.infolist())):
            raise OSError("its checksums are wrong")
