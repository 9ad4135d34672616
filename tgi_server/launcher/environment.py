"""Facts for a bug report: the machine, and the versions of installed packages, none of which is imported."""

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shared.control_groups import usable_cores

PACKAGES = (
    "oatmill",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "llguidance",
    "grpcio",
    "protobuf",
    "starlette",
    "uvicorn",
    "pydantic",
)
CPU_FEATURES = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile",
                "asimd", "sve", "bf16", "i8mm")  # fmt: skip
UNKNOWN = "unknown"


def describe_environment() -> str:
    """Returns lines of `name: value`."""
    facts = {
        "revision": output_of("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD") or UNKNOWN,
        "system": _system(),
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        **{name: _version(name) for name in PACKAGES},
        "cpu": describe_cpu(),
        "memory": _memory(),
        "nvidia-smi": output_of("nvidia-smi") or "not there",
    }
    return "\n".join(f"{name}: {value}" for name, value in facts.items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _system() -> str:
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        distribution = UNKNOWN
    return f"{platform.system()} {platform.release()} {platform.machine()}, {distribution}"


def describe_cpu() -> str:
    """Returns the CPU's model, the cores that this process may use, and the features that matter for speed."""
    facts = _table(Path("/proc/cpuinfo"))
    features = set((facts.get("flags") or facts.get("Features") or "").split())
    known = " ".join(name for name in CPU_FEATURES if name in features)
    return f"{facts.get('model name', UNKNOWN)}, {usable_cores()} cores, {known}"


def _memory() -> str:
    facts = _table(Path("/proc/meminfo"))
    return f"{facts.get('MemTotal', UNKNOWN)}, available {facts.get('MemAvailable', UNKNOWN)}"


def _table(path: Path) -> dict[str, str]:
    """Returns the `name: value` lines of a file of /proc; of lines with one name the first."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in reversed(lines))
    return {name.strip(): value.strip() for name, _, value in pairs}


def output_of(*command: str) -> str:
    """Returns the output of a program; an empty text if it is missing or fails."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()
