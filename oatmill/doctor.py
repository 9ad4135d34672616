"""`oatmill doctor`: prints what works on this machine, what does not, and what to do about it."""

import argparse
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from shared.control_groups import available_ram, usable_cores
from shared.gpus import has_gpu
from shared.settings import package_version
from tgi_server.launcher.environment import output_of
from tgi_server.launcher.machine import INSTALL

_GIB: Final = 1 << 30
# Bytes of RAM below which even small quantized models do not fit beside their KV cache.
_LITTLE_RAM: Final = 4 * _GIB
# Default ports of `oatmill serve`, of its metrics, of the launcher and of the gRPC service.
_PORTS: Final = {8080: "--port", 9000: "--prometheus-port", 3000: "--port", 8000: "--grpc-port"}


class State(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    SLOW = "note"
    BROKEN = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. advice: what the user should do; empty: nothing."""

    state: State
    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.state:4}  {self.what}" + (f"\n      -> {self.advice}" if self.advice else "")


def main(arguments: Sequence[str]) -> int:
    """Prints a line for each finding. Returns 0 if a model can be served, 1 if not."""
    description = "Checks if this machine can serve a model, and says how to fix problems. Exit code 1: it cannot."
    argparse.ArgumentParser(prog="oatmill doctor", description=description).parse_args(arguments)
    broken = 0
    for check in CHECKS:
        for finding in check():
            print(finding, flush=True)
            broken += finding.state is State.BROKEN
    print(
        f"\n{broken} problems to solve first" if broken > 1 else "\n1 problem to solve first" if broken else "\nready"
    )
    return 1 if broken else 0


def _versions() -> Iterator[Finding]:
    yield Finding(State.OK, f"oatmill {package_version()}, Python {platform.python_version()}, {platform.platform()}")
    if importlib.util.find_spec("torch") is None:
        yield Finding(
            State.BROKEN,
            "the model server is not installed; the gRPC service alone works",
            INSTALL,
        )
        return
    found = []
    for name in ("torch", "transformers", "tokenizers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding(State.BROKEN, f"{name} is not installed", INSTALL)
    yield Finding(State.OK, ", ".join(found))


def _cpu() -> Iterator[Finding]:
    from tgi_server.launcher.environment import describe_cpu

    cores = usable_cores()
    advice = "speed on CPUs depends on the number of cores; give the server more of them" if cores < 2 else ""
    yield Finding(State.OK if cores > 1 else State.SLOW, f"CPU: {describe_cpu()}", advice)
    if importlib.util.find_spec("psutil") is None:  # comes with the model server
        return
    free = available_ram()
    little = free < _LITTLE_RAM
    advice = "serve a small model, or one of 4 bits (--quantize int4)" if little else ""
    yield Finding(State.SLOW if little else State.OK, f"memory: {free / _GIB:.1f} GiB available", advice)


def _kernels() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return
    from tgi_server.engine.kernels.build import compiled_library

    if library := compiled_library():
        yield Finding(State.OK, f"CPU kernels: {library}")
    elif shutil.which("g++") or shutil.which("clang++"):
        yield Finding(
            State.SLOW,
            "CPU kernels: not compiled yet; the first start on a CPU compiles them while it serves",
            "to compile them now, which takes some minutes: python -m tgi_server.engine.kernels",
        )
    else:
        yield Finding(
            State.SLOW,
            "CPU kernels: none for this machine, and no C++ compiler; plain torch is used, several times slower",
            "pip install --find-links dist oatmill-kernels, or install g++",
        )


def _gpu() -> Iterator[Finding]:
    if not has_gpu():
        yield Finding(State.OK, "GPU: none; models run on the CPU")
        return
    cards = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    cards = cards or "nvidia-smi does not answer"
    code = "import torch; torch.zeros(1, device='cuda'); print(torch.version.cuda)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if result.returncode == 0:
        yield Finding(State.OK, f"GPU: {'; '.join(cards.splitlines())}; torch uses CUDA {result.stdout.strip()}")
        return
    reason = (result.stderr.strip().splitlines() or ["unknown"])[-1]
    yield Finding(
        State.BROKEN,
        f"GPU: {'; '.join(cards.splitlines())}, but torch cannot use it: {reason}",
        "install a torch that fits the driver (https://pytorch.org/get-started), update the driver, or set "
        "CUDA_VISIBLE_DEVICES to an empty value to serve on the CPU",
    )


def _ports() -> Iterator[Finding]:
    from tgi_server.launcher.errors import CannotStartError
    from tgi_server.launcher.machine import check_port

    free = []
    for port, flag in _PORTS.items():
        try:
            check_port("0.0.0.0", port, flag)
            free.append(str(port))
        except CannotStartError as error:
            what, _, advice = str(error).partition("; ")
            yield Finding(State.SLOW, what, advice)
    if free:
        yield Finding(State.OK, f"free ports: {', '.join(free)}")


CHECKS: Final[Sequence[Callable[[], Iterator[Finding]]]] = (_versions, _cpu, _kernels, _gpu, _ports)
