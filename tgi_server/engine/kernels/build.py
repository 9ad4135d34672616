"""Compiles the CPU kernels and loads them into torch as `torch.ops.oatmill.*`.

`python -m tgi_server.engine.kernels` compiles them ahead of time; `make install` does so for the machine at hand, the
container image for the kinds of CPUs that it may run on, and `make dist` for the package `oatmill-kernels`.
"""

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import torch

from shared.control_groups import usable_cores
from shared.user_cache import NO_HOME, user_cache
from tgi_server.engine.progress import progress
from tgi_server.loading import COMPILING

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "cpu"
SOURCES = sorted(FOLDER.rglob("*.cpp"))
HEADERS = sorted(FOLDER.rglob("*.h"))
TEMPORARY = Path(tempfile.gettempdir()) / f"oatmill-{os.getuid()}"
CACHE = user_cache() / "kernels"
# The package in which `make dist` puts compiled libraries.
PACKAGE = "oatmill_kernels"
FLAGS = [
    *("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-DAT_PARALLEL_OPENMP=1"),
    # Sums keep the order of the source, and a product is fused with a sum only where the source says `fma`: a row's
    # result must not depend on the rows beside it, nor on the loop that computes it.
    *("-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-ffp-contract=off", "-Wno-psabi"),
    # The same register is read as floats, words or bytes.
    "-fno-strict-aliasing",
    # On aarch64 the compiler would move loads forward until sums no longer fit into registers; elsewhere it does not.
    "-fno-schedule-insns",
]
# Processor time that a file may take: beside a busy server, or at low priority, a file waits much longer than that.
COMPILE_SECONDS = 900
# Numbers of libraries, and of objects, that stay in the cache: those that were used last.
_LIBRARIES, _OBJECTS = 12, 12 * len(SOURCES)
_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)

NATIVE = "native"
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_BF16 = _AVX512 | {"avx512_bf16", "avx512_vnni"}
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_ARMV8_2 = frozenset({"asimd", "atomics", "crc32", "asimdrdm", "asimddp"})
# Kinds of CPUs by the compiler's names, with Linux's names of the features that they need; the fastest first.
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

    Returns False, after a warning with the reason, if they are not available; plain torch then does their work, slower.
    It also returns False after `compile_beside`.
    """
    if _compiles_beside:
        return False
    try:
        library = compiled_library() or _compiled(NATIVE)
        torch.ops.load_library(library)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("CPU kernels are not available, so generation will be slower: %s", error)
        return False
    if library.parent == CACHE:
        with contextlib.suppress(OSError):  # it may be another user's
            os.utime(library)  # so that it is not removed as an old one
    logger.debug("CPU kernels: %s", library)
    return True


_compiles_beside = False


def compile_beside() -> bool:
    """Starts a child that compiles the kernels if there are none for this machine; this process does without them.

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
    """Compiles the kernels for some targets. Returns False, after a warning with the reason, if that fails.

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


def compiled_library() -> Path | None:
    """Returns the best library that is compiled already and runs on this machine; None if there is none."""
    features = set(_cpu_features().split())
    fitting = [NATIVE, *(target for target, needed in TARGETS.items() if needed <= features)]
    folders = [CACHE, *([TEMPORARY] if _is_private_folder(TEMPORARY) else []), *_package_folders()]
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


def is_private(status: os.stat_result) -> bool:
    """Returns True for a file or folder that only this user can write to."""
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _is_private_folder(folder: Path) -> bool:
    """Returns True for a folder whose libraries are this user's: those of another user would run that user's code."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_private(status)


def _temporary_cache() -> Path:
    """Returns a folder for kernels below the temporary one; later starts find it if it is kept. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        TEMPORARY.mkdir(mode=0o700)
    folder = TEMPORARY if _is_private_folder(TEMPORARY) else Path(tempfile.mkdtemp(prefix="oatmill-kernels-"))
    logger.warning(
        "%s, so the CPU kernels are kept in %s; set XDG_CACHE_HOME to a folder that later starts find",
        "this user has no home" if NO_HOME in CACHE.parents else f"{CACHE} cannot be written to",
        folder,
    )
    return folder


def _compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def _compiled(target: str) -> Path:
    library = _library(target)
    if not library.exists():
        if not _is_writable(library.parent):
            library = _temporary_cache() / library.name
        with library.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # or else each of several processes would compile them
            if not library.exists():
                _compile(library, target)
    return library


def _compile(library: Path, target: str) -> None:
    """Compiles the sources that have changed since they were last compiled, and links all objects."""
    compiler = _compiler()
    if compiler is None:
        raise OSError("no C++ compiler was found; install g++ and start again")
    from torch.utils import cpp_extension  # imports setuptools, which no process needs that finds compiled kernels

    machine = "this machine" if target == NATIVE else target
    libraries = [*(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"]
    folder = library.parent / "objects"
    folder.mkdir(exist_ok=True)
    objects = {source: folder / f"{_key_of_object(source, target, compiler)}.o" for source in SOURCES}
    missing = [source for source, compiled in objects.items() if not _is_used(compiled)]
    log = "compiling %d of %d files of the CPU kernels for %s; all of them take a few minutes"
    logger.info(log, len(missing), len(SOURCES), machine)
    finished = count(len(SOURCES) - len(missing) + 1)
    progress(COMPILING)

    def compile_one(source: Path) -> None:
        with _whole(objects[source]) as unfinished:
            _run(command(compiler, target, source, unfinished))
        done = next(finished)
        progress(COMPILING, done / len(SOURCES))
        logger.info("compiled %d of %d files of the CPU kernels", done, len(SOURCES))

    with ThreadPoolExecutor(usable_cores()) as threads:
        for _ in threads.map(compile_one, missing):  # raises what one of them raised
            pass
    with _whole(library) as unfinished:
        inputs = [str(compiled) for compiled in objects.values()]
        _run([compiler, *FLAGS, f"-march={target}", "-shared", *inputs, *libraries, "-o", str(unfinished)])
    with contextlib.suppress(OSError):  # of another user's files
        _remove_old(library.parent)


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Yields a path to write to; it is renamed to `file` if nothing is raised. Several processes may do so at once."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _is_used(compiled: Path) -> bool:
    """Returns True if the object exists, and marks it as used now."""
    with contextlib.suppress(OSError):  # it may be another user's
        os.utime(compiled)
    return compiled.exists()


def _remove_old(folder: Path) -> None:
    """Removes the least recently used libraries, with their lock files, and objects."""
    for library in _last_used(folder.glob("*.so"))[_LIBRARIES:]:
        for file in folder.glob(f"{library.stem}*"):
            file.unlink(missing_ok=True)
    for file in _last_used((folder / "objects").iterdir())[_OBJECTS:]:
        file.unlink(missing_ok=True)


def _last_used(files: Iterable[Path]) -> list[Path]:
    """Returns files, those that were used last first."""
    times: dict[Path, float] = {}
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # another process removes some, too
            times[file] = file.stat().st_mtime
    return sorted(times, key=times.__getitem__, reverse=True)


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
    limited = ["sh", "-c", 'ulimit -t "$0" && exec "$@"', str(COMPILE_SECONDS), *command]
    result = subprocess.run(limited, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or ["no output"]
        raise OSError(f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0])}")


def _key(target: str) -> str:
    """Returns a name that differs between machines where a library might not run or have other results."""
    digest = _hash_of_sources().copy()
    digest.update(_circumstances(target))
    return digest.hexdigest()[:20]


def _key_of_object(source: Path, target: str, compiler: str) -> str:
    """Returns a name that differs whenever the compiler might compile a source to another object."""
    digest = hashlib.sha256(f"{Path(compiler).name} {source.relative_to(FOLDER)}".encode() + _circumstances(target))
    for file in (source, *_included(source)):
        digest.update(file.read_bytes())
    return f"{source.stem}-{digest.hexdigest()[:20]}"


def _included(source: Path) -> list[Path]:
    """Returns the headers of this folder that a source includes, and those that these include, by their names."""
    found: set[Path] = set()
    waiting = [source]
    while waiting:
        names = _INCLUDE.findall(waiting.pop().read_bytes())
        new = {FOLDER / name.decode() for name in names} - found
        found |= new
        waiting += new
    return sorted(found)


def _circumstances(target: str) -> bytes:
    """Returns everything but the sources that the compiled library depends on."""
    release = torch.__version__.partition("+")[0]  # builds for CPUs and for GPUs have the same interfaces
    features = _cpu_features() if target == NATIVE else ""
    return " ".join([release, platform.machine(), *FLAGS, target]).encode() + features.encode()


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
