"""Chooses by measuring: which kernel computes the rows of a model's linear layers on this machine."""

import hashlib
import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from tgi_server.engine.checkpoint.quantized import QuantizedLinear, QuantizedWeight
from tgi_server.engine.checkpoint.quantized.weight import CODES, LINE
from tgi_server.engine.kernels import cache_path
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.int8 import Int8Linear
from tgi_server.engine.linear.kernel_linear import TILE
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.quantized import PackedQuantizedLinear, kind_of
from tgi_server.engine.memory import malloc_trim
from tgi_server.engine.parallel import ShardGroup

logger = logging.getLogger(__name__)

# Numbers of rows that are timed. A table says nothing finer.
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
# A kernel takes over from the one for more rows, and a layout from the first one, only if it is so many times as fast:
# below that it may be noise. From many rows down, since more time is lost with many.
WORTH = 1.1
BUDGET_SECONDS = 1.5
# What takes longer was measured beside programs that wanted the cores, too, and is not kept for later starts.
_QUIET_SECONDS = 2 * BUDGET_SECONDS
# Bytes of weights that are timed, of all candidates together: enough that they come from memory, as the model's do, not
# from a cache, and no more, since they stand beside those of the model.
_WEIGHT_BYTES = 48 << 20
# Operations of one measurement with many rows: more would not change which kernel is the fastest.
_OPERATIONS = 2e8
_REPEATS = 5
# Models with fewer weights than this compute for so short a time that any kernel will do.
_SMALL_BYTES = 32 << 20
# Kernels that emulate instructions end so. They are in builds for tests only.
_EMULATED = "_emulated"
# The kernel that quantizes its inputs to 8 bits: it is used if it is named, and never because it is fast.
W4A8 = "w4a8"
# The kernel that quantizes them to 16 bits, for models whose dtype has no more; with a codebook to 14.
W4A16 = "w4a16"
# Those that round neither inputs nor weights, which models in float32 ask for.
_EXACT = ("fma", "fma_dequant")
# Inputs of a group in quantized weights that are timed.
_GROUP = 64

# Seconds of all layers together, by the number of rows.
Times = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Weights:
    """A kind of weights, all of which are multiplied by the same kernels.

    name: tells it from others. dtype: of the inputs. bits: of a weight. kernels: those of the engine's own that run on
    this CPU, the one to begin with first. by_name: those that are taken by their name only.
    make: returns a layer of so many outputs and inputs, with these kernels.
    """

    name: str
    dtype: torch.dtype
    bits: int
    kernels: tuple[str, ...]
    make: Callable[[int, int, KernelTable], PackedLinear]
    by_name: tuple[str, ...] = ()

    @classmethod
    def plain(cls, layer: type[FloatLinear], dtype: torch.dtype) -> Self:
        """Weights that are dense, and become what such layers have."""
        int8 = layer is Int8Linear
        stored = torch.int8 if int8 else dtype
        packed = torch.ops.oatmill.linear_pack(torch.zeros(1, 64, dtype=stored))

        def make(outputs: int, inputs: int, table: KernelTable) -> PackedLinear:
            weight = torch.full((outputs, inputs), 0.01, dtype=dtype)
            return layer(weight, None, table)

        name, bits = f"{layer.__name__} {dtype}", stored.itemsize * 8
        return cls(name, dtype, bits, _real(torch.ops.oatmill.linear_kernels(packed)), make)

    @classmethod
    def quantized(cls, kind: str, dtype: torch.dtype) -> Self:
        """Quantized weights of a kind. dtype: of the model."""
        bits = 4 if kind in ("int4", "codebook") else 8
        codebook = {"int4": LINE, "codebook": LINE.flip(0)}.get(kind)
        codes = {4: torch.uint8, 8: torch.float8_e4m3fn if kind == "fp8" else torch.int8}[bits]

        def make(outputs: int, inputs: int, table: KernelTable) -> PackedLinear:
            scales = torch.full((outputs, -(-inputs // _GROUP)), 2.0**-7)  # which is narrow, as most are
            numbers = torch.full((outputs, inputs * bits // 8), 51, dtype=torch.uint8).view(codes)  # 3 and 3 in 4 bits
            zeros = torch.full(scales.shape, CODES / 2 - 1) if kind == "int4" else None  # 8 would stand for none
            weight = QuantizedWeight.of(numbers, scales, zeros, codebook=codebook)
            return PackedQuantizedLinear(weight, None, table)

        kernels = torch.ops.oatmill.quantized_kernels(kind)
        if dtype == torch.float32:
            kernels = [name for name in kernels if name in (*_EXACT, W4A8)]
        elif kind == "codebook" and dtype != torch.bfloat16:
            kernels = [name for name in kernels if name != W4A16]
        by_name = tuple(name for name in kernels if name == W4A8)
        return cls(f"{kind} {dtype}", dtype, bits, _real(kernels), make, by_name)


def _real(kernels: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in kernels if not name.endswith(_EMULATED) and name != W4A8)


def plain_shapes(model: nn.Module) -> Counter[tuple[int, int]]:
    """Returns how many linear layers of each shape, (outputs, inputs), have dense weights."""
    shapes = (module.weight.shape for module in model.modules() if isinstance(module, nn.Linear))
    return Counter((outputs, inputs) for outputs, inputs in shapes)


def quantized_shapes(model: nn.Module) -> dict[str, Counter[tuple[int, int]]]:
    """Returns how many linear layers of each shape have quantized weights, by their kind."""
    found: dict[str, Counter[tuple[int, int]]] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            kind = kind_of(module.quantized(0, 1))
            found.setdefault(kind, Counter())[module.out_features, module.in_features] += 1
    return found


def choose_kernels(shapes: Counter[tuple[int, int]], weights: Weights, group: ShardGroup | None) -> KernelTable:
    """Returns the table for layers that are about to be packed, the same for all shards of a model."""
    answer = str(_chosen(shapes, weights)) if group is None or group.rank == 0 else ""
    return KernelTable.of(group.exchange(answer)[0] if group else answer)


def _chosen(shapes: Counter[tuple[int, int]], weights: Weights) -> KernelTable:
    outputs_by_depth: Counter[int] = Counter()
    for (outputs, inputs), count in shapes.items():
        outputs_by_depth[inputs] += outputs * count
    numbers = sum(outputs * inputs for inputs, outputs in outputs_by_depth.items())
    if numbers * weights.bits // 8 < _SMALL_BYTES:
        return KernelTable.of(weights.kernels[0])
    place = _cache_file(outputs_by_depth, weights)
    if (cached := _read(place)) is not None:
        logger.info("linear layers: %s, as measured on this machine before (%s)", cached, place)
        return cached
    started = time.perf_counter()
    table = choose(measure(outputs_by_depth, {name: (weights, name) for name in weights.kernels}))
    malloc_trim()  # some 100 MB of trials
    seconds = time.perf_counter() - started
    quiet = seconds <= _QUIET_SECONDS
    busy = "" if quiet else "; other programs keep the cores busy, so the next start measures again"
    logger.info("linear layers: %s, measured in %.1f s%s", table, seconds, busy)
    if quiet:
        _write(place, table)
    return table


def choose(times: Mapping[str, Times]) -> KernelTable:
    """Returns the table that is fastest by these times of kernels, the one to begin with first."""
    kernel, from_rows = next(iter(times)), dict[int, str]()
    for rows in sorted(times[kernel], reverse=True):
        fastest = min(times, key=lambda name: times[name][rows])
        if times[kernel][rows] > WORTH * times[fastest][rows]:
            kernel = fastest
        from_rows[rows] = kernel
    table: list[tuple[int, str]] = []
    for rows, kernel in sorted(from_rows.items()):
        if not table or table[-1][1] != kernel:
            table.append((rows if table else 1, kernel))
    return KernelTable(tuple(kernel for _, kernel in table), tuple(rows for rows, _ in table))


def measure(
    outputs_by_depth: Mapping[int, int],
    candidates: Mapping[str, tuple[Weights, str]],
    numbers_of_rows: Sequence[int] = ROWS,
    *,
    seconds: float = BUDGET_SECONDS,
) -> dict[str, dict[int, float]]:
    """Returns the times of candidates: seconds of all layers together, by the number of rows.

    outputs_by_depth: how many outputs all layers with so many inputs have together. candidates: weights, all for inputs
    of one dtype, and the kernel that multiplies them. seconds: how long it may take.
    """
    dtype = next(weights.dtype for weights, _ in candidates.values())
    times = {name: dict.fromkeys(numbers_of_rows, 0.0) for name in candidates}
    # OpenMP's threads wait for each other: where other programs want the cores, too, every kernel would take as long.
    before = torch.ops.oatmill.set_own_threads(torch.get_num_threads())
    try:
        for depth, outputs in outputs_by_depth.items():
            share = _WEIGHT_BYTES // len(candidates)
            trials = {name: _Trial.of(kernel, depth, weights, share) for name, (weights, kernel) in candidates.items()}
            inputs = [torch.full((rows, depth), 0.01, dtype=dtype) for rows in numbers_of_rows]
            # In turns, so that a busy moment hits all alike, and nobody finds its weights in a cache.
            places = [(name, x) for x in inputs for name in trials]
            for name, x in places:
                trials[name].seconds_an_output(x)  # of a first call, which makes the layer
            best = {(name, len(x)): math.inf for name, x in places}
            deadline = time.perf_counter() + seconds / len(outputs_by_depth)
            for repeat in range(_REPEATS):
                if repeat > 1 and time.perf_counter() > deadline:
                    break
                for name, x in places:
                    best[name, len(x)] = min(best[name, len(x)], trials[name].seconds_an_output(x))
            for (name, rows), of_output in best.items():
                times[name][rows] += of_output * outputs
    finally:
        torch.ops.oatmill.set_own_threads(before)
    return times


@dataclass(frozen=True, slots=True)
class _Trial:
    """Layers of one depth with one kernel: a large one for few rows, and smaller ones for many."""

    by_outputs: Callable[[int], PackedLinear]
    most: int  # outputs

    @classmethod
    def of(cls, name: str, depth: int, weights: Weights, most_bytes: int) -> Self:
        most = max(TILE, most_bytes * 8 // (depth * weights.bits) // TILE * TILE)
        layers: dict[int, PackedLinear] = {}

        def by_outputs(outputs: int) -> PackedLinear:
            if outputs not in layers:
                layers[outputs] = weights.make(outputs, depth, KernelTable.of(name))
            return layers[outputs]

        return cls(by_outputs, most)

    def seconds_an_output(self, x: Tensor) -> float:
        rows, depth = x.shape
        least = TILE * 4 * torch.get_num_threads()
        affordable = int(_OPERATIONS * torch.get_num_threads() / (2 * rows * depth))
        outputs = min(self.most, max(least, 1 << (affordable.bit_length() - 1)) // TILE * TILE)
        linear = self.by_outputs(outputs)
        started = time.perf_counter()
        linear(x)
        return (time.perf_counter() - started) / outputs


def _cache_file(outputs_by_depth: Mapping[int, int], weights: Weights) -> Path:
    facts = [sorted(outputs_by_depth.items()), weights.name, torch.get_num_threads(), ROWS]
    return cache_path("linear-" + hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12] + ".txt")


def _read(place: Path) -> KernelTable | None:
    try:
        return KernelTable.of(place.read_text())
    except (OSError, ValueError):
        return None


def _write(place: Path, table: KernelTable) -> None:
    scratch = place.with_name(f"{place.name}.{os.getpid()}")
    try:
        scratch.write_text(str(table))
        os.replace(scratch, place)
    except OSError as error:
        logger.info("the choice of kernels cannot be kept, so the next start measures again: %s", error)
