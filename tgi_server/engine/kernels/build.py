"""Compiles the CPU kernels and loads them into torch as `torch.ops.oatmill.*`.

`python -m tgi_server.engine.kernels` compiles them ahead of time; `make install` and the container image do.
"""

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

logger = logging.getLogger(__name__)

SOURCES = sorted(Path(__file__).parent.glob("*.cpp"))
HEADERS = sorted(Path(__file__).parent.glob("*.h"))
CACHE = Path.home() / ".cache" / "oatmill" / "kernels"
FLAGS = [
    *("-O3", "-march=native", "-std=c++20", "-fPIC", "-fopenmp", "-DAT_PARALLEL_OPENMP=1"),
    *("-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros"),
]
COMPILE_SECONDS = 300


@functools.cache
def load_kernels() -> bool:
    """Makes the kernels available, compiling them if that has not been done on this kind of machine.

    Returns False, after a warning that says why, when they cannot be had; plain torch then does their work, slower.
    """
    try:
        torch.ops.load_library(_compiled())
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("CPU kernels are not available, so generation will be slower: %s", error)
        return False
    return True


def _compiled() -> Path:
    library = CACHE / f"{_key()}.so"
    if not library.exists():
        try:
            library.parent.mkdir(parents=True, exist_ok=True)
            writable = os.access(library.parent, os.W_OK)
        except OSError:
            writable = False
        if not writable:
            logger.info("%s cannot be written to, so the kernels are compiled for this process alone", CACHE)
            library = Path(tempfile.mkdtemp(prefix="oatmill-kernels-")) / library.name
        _compile(library)
    return library


def _compile(library: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise OSError("no C++ compiler was found; install g++ and start again")
    logger.info("compiling the CPU kernels for this machine, once")
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch, ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = [Path(scratch) / f"{source.stem}.o" for source in SOURCES]
        commands = [
            [compiler, *FLAGS, *includes, "-c", str(source), "-o", str(target)]
            for source, target in zip(SOURCES, objects, strict=True)
        ]
        for _ in threads.map(_run, commands):  # raises what one of them raised
            pass
        linked = Path(scratch) / library.name
        _run([compiler, *FLAGS, "-shared", *map(str, objects), *libraries, "-o", str(linked)])
        os.replace(linked, library)


def _run(command: list[str]) -> None:
    """Raises OSError with the compiler's first error."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no output"]
        raise OSError(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0])}")


def _key() -> str:
    """Differs wherever the same library might not run, or not do the same."""
    digest = hashlib.sha256()
    for source in [*SOURCES, *HEADERS]:
        digest.update(source.read_bytes())
    digest.update(" ".join([torch.__version__, platform.machine(), *FLAGS]).encode())
    digest.update(_cpu_features().encode())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
