"""Compiles the CPU kernels and loads them into torch as `torch.ops.oatmill.*`.

`python -m tgi_server.engine.kernels` compiles them ahead of time; `make install` does so for the machine at hand, the
container image for the kinds of CPUs that it may run on, and `make dist` for the package `oatmill-kernels`.
"""

import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import torch

from shared.control_groups import usable_cores

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "cpu"
SOURCES = sorted(FOLDER.rglob("*.cpp"))
HEADERS = sorted(FOLDER.rglob("*.h"))
CACHE = Path.home() / ".cache" / "oatmill" / "kernels"
# The package in which `make dist` puts compiled libraries.
PACKAGE = "oatmill_kernels"
FLAGS = [
    *("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-DAT_PARALLEL_OPENMP=1"),
    # Sums are added up in the order that is written, and products and sums are rounded together only where `fma` is
    # written: a row's result must not depend on the rows beside it, nor on the loop that computes it.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=off", "-Wno-psabi"),
    # A register is read as one of floats, of words or of bytes, as its bits are wanted.
    "-fno-strict-aliasing",
    # For aarch64 the compiler would load ahead until sums no longer fit the registers; elsewhere it does not by itself.
    "-fno-schedule-insns",
]
COMPILE_SECONDS = 900

NATIVE = "native"
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_ARMV8_2 = frozenset({"asimd", "atomics", "crc32", "asimdrdm", "asimddp"})
# Kinds of CPUs by the compiler's names, and what Linux calls the features that they must have; the fastest first.
X86_TARGETS: Mapping[str, frozenset[str]] = {
    "sapphirerapids": _BF16 | {"amx_tile", "amx_bf16", "amx_int8", "avx512_fp16", "avx_vnni"},
    "cooperlake": _BF16,
    "cascadelake": _AVX512 | {"avx512_vnni"},
    "skylake-avx512": _AVX512,
    "alderlake": _AVX2 | {"avx_vnni", "adx", "gfni", "movdiri", "movdir64b", "rdseed", "sha_ni", "vaes", "vpclmulqdq"},
    "x86-64-v3": _AVX2,
    "x86-64-v2": frozenset({"sse4_1", "sse4_2", "ssse3", "popcnt", "cx16"}),
}
ARM_TARGETS: Mapping[str, frozenset[str]] = {
    "armv8.2-a+dotprod+bf16+i8mm": _ARMV8_2 | {"bf16", "i8mm"},
    "armv8.2-a+dotprod": _ARMV8_2,
    "armv8-a": frozenset({"asimd"}),
}
TARGETS = ARM_TARGETS if platform.machine() == "aarch64" else X86_TARGETS


@functools.cache
def load_kernels() -> bool:
    """Makes the kernels available, compiling them if that has not been done for this kind of machine.

    Returns False, after a warning that says why, when they cannot be had; plain torch then does their work, slower.
    So it does after `compile_beside`.
    """
    if _compiles_beside:
        return False
    try:
        library = compiled_library() or _compiled(NATIVE)
        torch.ops.load_library(library)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("CPU kernels are not available, so generation will be slower: %s", error)
        return False
    logger.debug("CPU kernels: %s", library)
    return True


_compiles_beside = False


def compile_beside() -> bool:
    """Makes this process do without kernels if none are compiled for this machine, and a child of it compile them.

    Returns True if a child does so, at low priority; the kernels are used from the next start on. A compilation that is
    interrupted resumes at the next start.
    """
    global _compiles_beside
    if compiled_library() is not None or _compiler() is None or not _is_writable(CACHE):
        return False
    _compiles_beside = True
    logger.warning(
        "the CPU kernels are being compiled in the background, at low priority; the next start uses them. Until then, "
        "plain torch is used, several times slower. To wait for them instead: python -m tgi_server.engine.kernels"
    )
    command = [sys.executable, "-m", "tgi_server.engine.kernels", "--low-priority"]
    subprocess.Popen(command, stdin=subprocess.DEVNULL)  # of the process's group, with which it ends
    return True


def prepare(targets: Iterable[str], folder: Path | None = None) -> bool:
    """Compiles the kernels for some targets. Returns False, after a warning that says why, when that fails.

    folder: where the libraries are put; None: the cache.
    """
    try:
        for target in targets:
            library = _compiled(target)
            if folder is not None:
                shutil.copy(library, folder)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the CPU kernels cannot be compiled: %s", error)
        return False
    return True


def cache_path(name: str) -> Path:
    """Returns where to keep what was found out about these kernels on this machine."""
    return CACHE / f"{_key(NATIVE)}-{name}"


def compiled_library() -> Path | None:
    """Returns the best library that is compiled already and runs on this machine; None if there is none."""
    features = set(_cpu_features().split())
    fitting = [NATIVE, *(target for target, needed in TARGETS.items() if needed <= features)]
    folders = [CACHE, *_package_folders()]
    return next((path for target in fitting for folder in folders if (path := _library(target, folder)).exists()), None)


def _package_folders() -> list[Path]:
    spec = importlib.util.find_spec(PACKAGE)
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _library(target: str, folder: Path | None = None) -> Path:
    return (folder or CACHE) / f"{_key(target)}.so"


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def _compiled(target: str) -> Path:
    library = _library(target)
    if not library.exists():
        if not _is_writable(library.parent):
            logger.info("%s cannot be written to, so the kernels are compiled for this process alone", CACHE)
            library = Path(tempfile.mkdtemp(prefix="oatmill-kernels-")) / library.name
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # or else each of several processes would compile them
            if not library.exists():
                _compile(library, target)
    return library


def _compile(library: Path, target: str) -> None:
    """Compiles what an earlier attempt has left to do."""
    compiler = _compiler()
    if compiler is None:
        raise OSError("no C++ compiler was found; install g++ and start again")
    from torch.utils import cpp_extension  # imports setuptools, which no process needs that finds compiled kernels

    machine = "this machine" if target == NATIVE else target
    logger.info("compiling the CPU kernels for %s, once; it takes a few minutes", machine)
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
    objects = library.with_suffix(".objects")
    objects.mkdir(exist_ok=True)
    files = [(source, objects / f"{source.stem}.o") for source in SOURCES]
    missing = [each for each in files if not each[1].exists()]
    finished = count(len(files) - len(missing) + 1)

    def compile_one(source: Path, compiled: Path) -> None:
        unfinished = compiled.with_suffix(".unfinished")
        _run(command(compiler, target, source, unfinished))
        unfinished.replace(compiled)
        logger.info("compiled %d of %d files of the CPU kernels", next(finished), len(files))

    with ThreadPoolExecutor(usable_cores()) as threads:
        for _ in threads.map(compile_one, *zip(*missing, strict=True)):  # raises what one of them raised
            pass
    linked = objects / library.name
    inputs = [str(compiled) for _, compiled in files]
    _run([compiler, *FLAGS, f"-march={target}", "-shared", *inputs, *libraries, "-o", str(linked)])
    linked.replace(library)
    shutil.rmtree(objects)


def command(compiler: str, target: str, source: Path, compiled: Path) -> list[str]:
    """Returns the command that compiles one file."""
    from torch.utils import cpp_extension

    folders = [str(path) for path in (FOLDER, *cpp_extension.include_paths())]
    # The same library wherever it is compiled: messages of failed checks name files.
    places = [f"-ffile-prefix-map={folder}=." for folder in folders]
    includes = [f"-I{folder}" for folder in folders]
    return [compiler, *FLAGS, f"-march={target}", *places, *includes, "-c", str(source), "-o", str(compiled)]


def _run(command: list[str]) -> None:
    """Raises OSError with the compiler's first error."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no output"]
        raise OSError(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0])}")


def _key(target: str) -> str:
    """Returns a name that differs wherever the same library might not run, or not do the same."""
    digest = _hash_of_sources().copy()
    release = torch.__version__.partition("+")[0]  # builds for CPUs and for GPUs have the same interfaces
    digest.update(" ".join([release, platform.machine(), *FLAGS, target]).encode())
    if target == NATIVE:
        digest.update(_cpu_features().encode())
    return digest.hexdigest()[:20]


@functools.cache
def _hash_of_sources() -> "hashlib._Hash":
    """Returns a hash that has read all sources, once for all keys of a process."""
    digest = hashlib.sha256()
    for source in [*SOURCES, *HEADERS]:
        digest.update(source.read_bytes())
    return digest


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
