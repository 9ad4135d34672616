"""GPUs that environment variables request, and GPUs of this machine; without torch, whose import takes seconds."""

import os
from pathlib import Path

# The first variable that is set says which GPUs may be used: a list, `all`, or one of NONE.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
NONE = frozenset({"", "-1", "none", "void", "NoDevFiles"})
# NVIDIA's container toolkit says nothing about GPUs by these values; with CDI it sets `void` where there are some.
SILENT = frozenset({"", "void"})
# The number of GPUs that the containers of deploy/ are to have.
COUNT = "GPU_COUNT"
# This folder has an entry for each GPU that the kernel's driver knows.
DRIVER = Path("/proc/driver/nvidia/gpus")
# Devices of machines without that folder: some containers, WSL, Jetson.
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost-gpu")


def listed_gpus() -> list[str] | None:
    """Returns the GPUs that a variable lists; None when all may be used."""
    return _variable()[1]


def visible_gpus() -> int:
    """Returns the number of GPUs that this process may use."""
    listed = listed_gpus()
    if listed is not None:
        return len(listed)
    return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0


def has_gpu() -> bool:
    """Returns True if this machine seems to have a GPU; a container sees the driver of its host, too."""
    return DRIVER.is_dir() or has_devices()


def has_devices() -> bool:
    """Returns True if there are devices of GPUs, which a container has only if it was given some."""
    return any(True for device in DEVICES for _ in Path("/").glob(device[1:]))


def missing_gpus(reason: str) -> str | None:
    """Returns an error, with the reason, if a variable requests GPUs; None if none does."""
    name, listed = _variable()
    if listed:
        return f"{name} is {','.join(listed)}, but {reason}; to run on the CPU, set {name} to an empty value"
    count = os.environ.get(COUNT, "").strip()
    if listed is not None or count in ("", "0"):
        return None
    return f"{COUNT} is {count}, but {reason}; to run on the CPU, unset {COUNT}"


def unusable_gpus(reason: str) -> str | None:
    """Returns an error, with the reason, if this process has GPUs; None if it has none, or is not to use one."""
    if not has_devices() or listed_gpus() == []:
        return None
    return f"this machine has a GPU, but {reason}; to run on the CPU, set {VARIABLES[0]} to an empty value"


def _variable() -> tuple[str, list[str] | None]:
    name = next((name for name in VARIABLES if name in os.environ), VARIABLES[0])
    value = os.environ.get(name, "all").strip()
    if value == "all" or (value in SILENT and name != VARIABLES[0]):
        return name, None
    return name, [] if value in NONE else [part.strip() for part in value.split(",") if part.strip()]
