"""How many shards a model is split into, and how many GPUs there are for them. No torch: it would take seconds."""

import os
from pathlib import Path

from tgi_server.launcher.errors import CannotStartError
from tgi_server.launcher.settings import LauncherSettings

VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
"""The first one that is set says which GPUs may be used: a list, `all`, or nothing."""
NONE = frozenset({"", "-1", "none", "void", "NoDevFiles"})
DRIVER = Path("/proc/driver/nvidia/gpus")
"""Has an entry for each GPU that the kernel's driver knows."""


def shard_count(settings: LauncherSettings) -> int:
    """Of this machine. Raises CannotStartError when it is left to the GPUs, and there are not several.

    Without --sharded, GPUs that are listed by a variable are counted, and it is one otherwise.
    """
    if settings.num_shard is not None:
        if settings.sharded == "true" and settings.num_shard * settings.num_nodes == 1:
            raise CannotStartError("--sharded: one shard is none; give --num-shard more than 1, or leave --sharded out")
        return settings.num_shard
    if settings.sharded == "false":
        return 1
    if settings.sharded is None:
        return max(1, len(_listed() or ()))
    count = visible_gpus()
    if count == 0:
        raise CannotStartError(
            "--sharded: no GPU is visible here; say with --num-shard how many processes are to share the CPUs"
        )
    if count == 1 and settings.num_nodes == 1:
        raise CannotStartError("--sharded: only one GPU is visible; leave --sharded out, or make more of them visible")
    return count


def visible_gpus() -> int:
    """GPUs of this machine that this process may use."""
    listed = _listed()
    if listed is not None:
        return len(listed)
    return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0


def _listed() -> list[str] | None:
    """The GPUs that a variable lists; None when all may be used."""
    value = next((os.environ[name].strip() for name in VARIABLES if name in os.environ), "all")
    if value == "all":
        return None
    return [] if value in NONE else [part for part in value.split(",") if part.strip()]
