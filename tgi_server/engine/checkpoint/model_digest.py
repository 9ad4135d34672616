"""Digests of all that a loaded model depends on: its settings, its files, and this version of the engine."""

import hashlib
import os
import platform
from dataclasses import fields
from pathlib import Path

import torch
import transformers

from tgi_server.engine.config import EngineConfig
from tgi_server.engine.kernels import compiled_library

# Settings that change neither packed weights nor keys and values.
_OTHER_SETTINGS = {
    *("group", "packed_cache", "memory_fraction", "cpu_memory", "cuda_graphs", "image_memory", "max_lora_rank"),
    *("speculate", "speculative_model", "watermark_gamma", "watermark_delta"),
}
_PACKAGE = Path(__file__).parents[2]


def model_digests(config: EngineConfig) -> tuple[str, str]:
    """Returns a digest of the settings and of this shard's rank; and one of the model's files, this package, its
    kernels and its libraries.

    Of a model's file name, size and time of change count, not the content, which may be many GB.
    """
    group = config.group
    settings = [(field.name, str(getattr(config, field.name))) for field in fields(config)]
    place = _digest(
        [setting for setting in settings if setting[0] not in _OTHER_SETTINGS], group and (group.rank, group.world_size)
    )
    library = compiled_library()
    sources = sorted([*_PACKAGE.rglob("*.py"), *_PACKAGE.rglob("*.toml")])
    state = _digest(
        [(file.name, status.st_size, status.st_mtime_ns) for file, status in _files(config.model_path)],
        [hashlib.sha256(file.read_bytes()).hexdigest() for file in sources],
        (library and library.name, torch.__version__, transformers.__version__, platform.python_version()),
    )
    return place, state


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    return [(file, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
