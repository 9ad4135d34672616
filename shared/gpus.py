"""GPUs that environment variables list, and those of this machine; without torch, whose import takes seconds."""

import os
from pathlib import Path

# The first variable that is set says which GPUs may be used: a list, `all`, or one of NONE.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
NONE = frozenset({"", "-1", "none", "void", "NoDevFiles"})
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
    """Returns True if this machine seems to have a GPU."""
    return DRIVER.is_dir() or any(True for device in DEVICES for _ in Path("/").glob(device[1:]))


def missing_gpus(reason: str) -> str | None:
    """Returns an error, with the reason, if a variable lists GPUs; None if none does."""
    name, listed = _variable()
    if not listed:
        return None
    return f"{name} is {','.join(listed)}, but {reason}; to run on the CPU, set {name} to an empty value"


def _variable() -> tuple[str, list[str] | None]:
    name = next((name for name in VARIABLES if name in os.environ), VARIABLES[0])
    value = os.environ.get(name, "all").strip()
    if value == "all":
        return name, None
    return name, [] if value in NONE else [part.strip() for part in value.split(",") if part.strip()]
