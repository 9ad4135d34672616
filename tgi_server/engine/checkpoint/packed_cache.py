"""Stores models packed for this machine's CPU, so that the next start need not convert and prove them again.

A file is what `torch.save` writes: an archive with a checksum of each part. Its name has two digests: of the settings,
and of what else its content depends on, which is the model's files, this package, its kernels and its libraries.

Reading one runs none of its code: torch reads it with `weights_only`, which makes objects of named classes alone, and
the classes are those of layers, specs and configurations (`_named`). File and folder have to be the server's own.
"""

import importlib
import logging
import os
import pickle
import re
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from transformers import GenerationConfig, PreTrainedConfig

from shared.processes import die_with_parent
from tgi_server.engine.checkpoint.checksums import Checksums
from tgi_server.engine.checkpoint.model_digest import model_digests
from tgi_server.engine.checkpoint.stored_weights import LEAST, copied_from
from tgi_server.engine.config import EngineConfig
from tgi_server.engine.kernels import compiled_library, load_kernels
from tgi_server.engine.kernels.build import is_private
from tgi_server.engine.memory import forget_file
from tgi_server.engine.parallel import ShardGroup

logger = logging.getLogger(__name__)

# The folder within the one of the settings, and the pattern of file names in it. No other file is ever deleted.
_FOLDER = "oatmill-packed-weights"
_FINISHED = re.compile(r"(?P<model>.+-[0-9a-f]{16})-[0-9a-f]{16}\.pt")
_UNFINISHED = re.compile(r"[A-Za-z0-9_]+\.unfinished")
# Maximum number of files in the folder: the most recently used ones stay.
_MOST_FILES = 8
_DAY = 86400
# A stored model consists of objects of this package, and of these layers and configurations.
_OWN_MODULES = re.compile(r"tgi_server\.engine(\.\w+)+")
_FOREIGN_MODULES = re.compile(r"torch\.nn\.modules\.\w+|transformers(\.\w+)+")
_FOREIGN_CLASSES = nn.Module, PreTrainedConfig, GenerationConfig
_OTHER_NAMES = {
    *("builtins.range", f"{__name__}._group_of_reader", "tgi_server.engine.linear.quantized.packed_kind_of"),
}

T = TypeVar("T")
# The shards of the model that is being read.
_group: ContextVar[ShardGroup | None] = ContextVar("group", default=None)


def packed_file(config: EngineConfig) -> Path | None:
    """Returns the file for the packed model, or for this shard of it; None if models are not stored.

    They are stored on CPUs that have kernels, except for models with Python code of their own.
    """
    if config.packed_cache is None or config.trust_remote_code or not config.custom_kernels:
        return None
    if not config.model_path.is_dir():  # loading raises the error
        return None
    if config.device.type != "cpu" or not load_kernels() or compiled_library() is None:
        return None
    place, state = model_digests(config)
    return config.packed_cache / _FOLDER / f"{config.model_path.name}-{place}-{state}.pt"


def read_packed(path: Path | None, group: ShardGroup | None, kind: type[T]) -> T | None:
    """Returns the object that `write_packed` wrote; None if there is no file, or one that cannot be used.

    path: None: there is no file. group: the shards of the model; None for a single shard. All shards have to call this;
    if one gets None, all do. kind: class of the object.
    """
    token = _group.set(group)
    try:
        content = None if path is None else _read(path, kind)
    finally:
        _group.reset(token)
    of_all = group is None or group.minimum(int(content is not None))
    return content if of_all else None


def write_packed(path: Path, content: Any, *, beside: bool = False) -> None:
    """Writes a model for later starts. If that is impossible, the log has the reason.

    beside: True: on Linux a child process at low priority writes the model as it is now, while this process goes on;
    the child ends with the thread that calls this.
    """
    if beside and sys.platform == "linux":
        _write_beside(path, content)
    else:
        _log_written(path, _write(path, content))


def _log_written(path: Path, fault: str) -> None:
    if fault:
        logger.info("packed weights are not stored in %s: %s", path.parent, fault)
    else:
        logger.info("packed weights are stored in %s for later starts", path)


def _write_beside(path: Path, content: Any) -> None:
    reader, writer = os.pipe()
    die = die_with_parent(signal.SIGTERM)
    child = os.fork()
    if child == 0:
        fault = "the server ended before"
        try:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which removes the unfinished file
            if die is not None:
                die()
            torch.set_num_threads(1)  # a forked process has none of the others
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            fault = _write(path, content)
        finally:
            os.write(writer, fault.encode())
            os._exit(0)
    os.close(writer)

    def wait() -> None:
        with open(reader, encoding="utf-8") as told:
            fault = told.read()
        _, status = os.waitpid(child, 0)
        _log_written(path, fault or (f"the process that writes them ended with status {status}" if status else ""))

    Thread(target=wait, name="packed-weights", daemon=True).start()


def _write(path: Path, content: Any) -> str:
    """Returns the reason why the model was not written; an empty text if it was."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(suffix=".unfinished", prefix="", dir=path.parent)
        try:
            with open(descriptor, "wb") as file:
                _save(content, file)
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise
        with suppress(FileNotFoundError):  # another shard may do the same
            _delete_old(path)
    except (OSError, RuntimeError, pickle.PicklingError, TypeError, AttributeError) as error:
        return str(error) or type(error).__name__
    return ""


def _save(content: Any, file: BinaryIO) -> None:
    """Writes a model. Raises OSError if the disk is full, in place of torch's error, which hides the cause."""
    faults: list[OSError] = []

    def write(data: bytes) -> int:
        try:
            return file.write(data)
        except OSError as error:
            faults.append(error)
            raise

    target = SimpleNamespace(write=write, flush=file.flush)
    try:
        torch.save(content, target, pickle_module=SimpleNamespace(__name__=__name__, Pickler=_Pickler))
    except RuntimeError:
        if faults:
            raise faults[0] from None
        raise


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        with _opened(path) as file:
            checksums = Checksums.of(file)
            checksums.check(LEAST)  # what is read as pickled objects is among these
            own = f"/dev/fd/{file}"  # the path may lead elsewhere by now
            os.utime(file, ns=(time.time_ns(), os.fstat(file).st_mtime_ns))
            classes = [_named(name) for name in get_unsafe_globals_in_checkpoint(own)]
            with safe_globals(classes), copied_from(path, file, checksums):
                content = torch.load(own, weights_only=True, mmap=True)
            checksums.check()
            if not isinstance(content, kind):
                raise TypeError(f"it has a {type(content).__name__}, not packed weights")
            forget_file(path)  # packed weights were copied into huge pages
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a damaged file leads to
        logger.warning("%s cannot be used, so the model is packed anew: %s", path, error)
        return None
    logger.info("packed weights come from %s", path)
    return content


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Yields the descriptor of a file that only this user can write to, in a folder of which the same is true.

    Raises OSError for any other, such as a symbolic link or a pipe.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError("it is not a regular file; delete it")
            for name, status in (("it", os.fstat(file)), ("its folder", os.fstat(folder))):
                if not is_private(status):
                    raise OSError(f"other users may have written {name}; delete {name}")
            yield file
        finally:
            os.close(file)
    finally:
        os.close(folder)


def _named(name: str) -> Any:
    """Returns the class, or one of two functions, that a stored object names. Raises TypeError for any other."""
    module, _, attribute = name.rpartition(".")
    own = _OWN_MODULES.fullmatch(module)
    if name in _OTHER_NAMES or own or _FOREIGN_MODULES.fullmatch(module):
        found = getattr(importlib.import_module(module), attribute, None)
        if name in _OTHER_NAMES or (isinstance(found, type) and (own or issubclass(found, _FOREIGN_CLASSES))):
            return found
    raise TypeError(f"it names {name}, which is not part of packed weights")


def _delete_old(path: Path) -> None:
    """Deletes earlier states of the same model, the least recently used files, and unfinished ones."""
    states = {file: file.lstat() for file in path.parent.iterdir() if file != path}
    files = {file: max(state.st_atime, state.st_mtime) for file, state in states.items()}
    models = sorted((file for file in files if _FINISHED.fullmatch(file.name)), key=files.__getitem__)
    earlier = [file for file in models if _model_of(file) == _model_of(path)]
    broken = [file for file in files if _UNFINISHED.fullmatch(file.name) and files[file] < time.time() - _DAY]
    for file in {*models[: 1 - _MOST_FILES], *earlier, *broken}:
        file.unlink()


def _model_of(file: Path) -> str:
    """Returns the common part of the file names of all states of a model."""
    return file.name.rpartition("-")[0]


def _group_of_reader() -> ShardGroup | None:
    return _group.get()


class _Pickler(pickle.Pickler):
    """Writes slices of larger tensors, or of files, without the rest; leaves out shard groups, which connect anew."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ShardGroup):
            return _group_of_reader, ()
        if not isinstance(value, Tensor) or value.untyped_storage().nbytes() <= value.nbytes:
            return NotImplemented
        own: Tensor = value.detach().clone()
        return (nn.Parameter(own, requires_grad=False) if isinstance(value, nn.Parameter) else own).__reduce_ex__(2)
