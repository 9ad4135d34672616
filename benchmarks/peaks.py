"""Measures a machine's peaks: the instructions that the CPU kernels multiply with, and reading from memory.

peaks.cpp has the loops; it is compiled for each run, which takes a second.
"""

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("peaks.cpp")
_SECONDS = 0.3
_ATTEMPTS = 3
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_MEMORY_BYTES = 256 << 20  # that each thread reads
# The instructions of each kernel of linear layers, the fastest first: a CPU has some of them.
_OF_KERNELS = {
    "fma": ("vfmadd231ps", "fmla"),
    "fma_dequant": ("vfmadd231ps", "fmla"),
    "bf16": ("vdpbf16ps", "bfdot"),
    "bf16_mmla": ("bfmmla",),
    "amx": ("tdpbf16ps",),
    "int8": ("vpdpbusd", "sdot"),
    "int8_mmla": ("smmla",),
    "int16": ("vpdpwssd", "vpmaddwd", "smlal"),
    **dict.fromkeys(("w4a16", "w6a16", "w8a16"), ("vpdpwssd", "vpmaddwd", "smlal")),
    **dict.fromkeys(("w4a8", "w6a8", "w8a8"), ("tdpbusd", "vpdpbusd", "sdot", "vpmaddubsw")),
}


@dataclass(frozen=True, slots=True)
class Peak:
    """Rates of one thread, and of all threads together: operations or bytes a second."""

    one: float
    all: float


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that a machine can do. instructions: operations, a multiplication and an addition being two.

    reading: bytes, by what is read: L1, L2, L3, memory. threads: how many "all" are.
    """

    instructions: dict[str, Peak]
    reading: dict[str, Peak]
    threads: int

    def of_kernel(self, name: str) -> Peak | None:
        """Returns the peak of a kernel's instruction; None if it was not measured."""
        return next((self.instructions[each] for each in _OF_KERNELS.get(name, ()) if each in self.instructions), None)


def measure_peaks(threads: int) -> Peaks:
    """Returns the best of several attempts each. Raises ValueError without a compiler."""
    library = _compiled()

    def best(rate: str, argument: int) -> Peak:
        function = getattr(library, rate)
        one, every = (
            max(function(argument, count, _SECONDS) for _ in range(_ATTEMPTS)) for count in (1, threads)
        )  # fmt: skip
        return Peak(one, every)

    names = [library.instruction_name(index).decode() for index in range(library.instructions())]
    instructions = {name: best("instruction_rate", index) for index, name in enumerate(names)}
    reading = {level: best("read_rate", size) for level, size in _sizes(threads).items()}
    return Peaks(instructions, reading, threads)


def _compiled() -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise ValueError("no C++ compiler was found; install g++")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "peaks.so"
        flags = ("-O3", "-std=c++20", "-march=native", "-shared", "-fPIC", "-pthread")
        subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))  # stays mapped when the file is gone
    loaded.instruction_name.restype = ctypes.c_char_p
    for rate, argument in (("instruction_rate", ctypes.c_int), ("read_rate", ctypes.c_int64)):
        function = getattr(loaded, rate)  # the same object each time, which indexing would not give
        function.restype, function.argtypes = ctypes.c_double, (argument, ctypes.c_int, ctypes.c_double)
    return loaded


def _sizes(threads: int) -> dict[str, int]:
    """Returns the bytes that a thread reads again and again: half of each cache, of a shared one half of its share."""
    sizes: dict[str, int] = {}
    for cache in sorted(_CACHES.glob("index*")):
        kind, level = ((cache / name).read_text().strip() for name in ("type", "level"))
        size = int((cache / "size").read_text().strip().removesuffix("K")) << 10
        if kind != "Instruction":
            sizes[f"L{level}"] = size // 2 // (threads if int(level) > 2 else 1)
    return sizes | {"memory": _MEMORY_BYTES}
