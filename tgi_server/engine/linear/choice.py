"""Chooses by measuring: which kernel computes the rows of a model's linear layers on this machine.

The kernels that read one layout of the weights may be mixed, one for few rows and another for many; oneDNN has a layout
of its own, and weights are kept once, so it is taken for all rows or for none.
"""

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

import torch
from torch import Tensor, nn

from tgi_server.engine.kernels import cache_path
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.float import TILE, FloatLinear
from tgi_server.engine.linear.int8 import Int8Linear
from tgi_server.engine.linear.kernel_table import ONEDNN, KernelTable
from tgi_server.engine.linear.onednn import OneDnnLinear
from tgi_server.engine.sharding import ShardGroup

logger = logging.getLogger(__name__)

# Numbers of rows that are timed. A table says nothing finer.
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
# A kernel takes over from the one for fewer rows, and a layout from the first one, only if it is so many times as fast:
# below that it may be noise.
WORTH = 1.05
BUDGET_SECONDS = 1.5
# Bytes of weights that are timed: enough that they come from memory, as the model's do, not from a cache.
_WEIGHT_BYTES = 16 << 20
# Operations of one measurement with many rows: more would not change which kernel is the fastest.
_OPERATIONS = 2e8
_REPEATS = 5
# Models with fewer weights than this compute for so short a time that any kernel will do.
_SMALL_BYTES = 32 << 20
# Kernels that stand in for instructions this CPU has not; tests choose them by name.
_EMULATED = "amx_emulated"

# Seconds of all layers together, by the number of rows.
Times = Mapping[int, float]


def choose_kernels(model: nn.Module, layer: type[FloatLinear], group: ShardGroup | None) -> KernelTable:
    """Returns the table for a model that is about to be packed in layers of this kind, the same for all its shards."""
    answer = str(_chosen(model, layer)) if group is None or group.rank == 0 else ""
    return KernelTable.of(group.exchange(answer)[0] if group else answer)


def _chosen(model: nn.Module, layer: type[FloatLinear]) -> KernelTable:
    shapes = Counter(tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear))
    dtypes = {module.weight.dtype for module in model.modules() if isinstance(module, nn.Linear)}
    outputs_by_depth: Counter[int] = Counter()
    for (outputs, inputs), count in shapes.items():
        outputs_by_depth[inputs] += outputs * count
    weights = sum(outputs * inputs for inputs, outputs in outputs_by_depth.items())
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    own = own_kernels(layer, dtype)
    if weights * dtype.itemsize < _SMALL_BYTES:
        return KernelTable.of(own[0])
    place = _cache_file(outputs_by_depth, layer, dtype)
    if (cached := _read(place)) is not None:
        logger.info("linear layers: %s, as measured on this machine before (%s)", cached, place)
        return cached
    started = time.perf_counter()
    candidates = own if layer is Int8Linear else [*own, ONEDNN]
    table = choose(measure(outputs_by_depth, layer, dtype, candidates))
    logger.info("linear layers: %s, measured in %.1f s", table, time.perf_counter() - started)
    _write(place, table)
    return table


def own_kernels(layer: type[FloatLinear], dtype: torch.dtype) -> list[str]:
    """Returns the names of the engine's own kernels for such layers on this CPU, the one to begin with first."""
    stored = torch.int8 if layer is Int8Linear else dtype
    packed = torch.ops.oatmill.linear_pack(torch.zeros(1, 64, dtype=stored))
    return [name for name in torch.ops.oatmill.linear_kernels(packed) if name != _EMULATED]


def choose(times: Mapping[str, Times]) -> KernelTable:
    """Returns the table that is fastest by these times of kernels, the one to begin with first; oneDNN may be last."""
    own = {name: by_rows for name, by_rows in times.items() if name != ONEDNN}
    best = {rows: min(by_rows[rows] for by_rows in own.values()) for rows in next(iter(own.values()))}
    if ONEDNN in times and math.prod(best[rows] / times[ONEDNN][rows] for rows in best) > WORTH ** len(best):
        return KernelTable.of(ONEDNN)
    kernels, from_rows = [next(iter(own))], [1]
    for index, rows in enumerate(sorted(best)):
        fastest = min(own, key=lambda name: own[name][rows])
        if own[kernels[-1]][rows] > WORTH * own[fastest][rows]:
            if index == 0:
                kernels = [fastest]
            else:
                kernels.append(fastest)
                from_rows.append(rows)
    return KernelTable(tuple(kernels), tuple(from_rows))


def measure(
    outputs_by_depth: Mapping[int, int],
    layer: type[FloatLinear],
    dtype: torch.dtype,
    candidates: Sequence[str],
    *,
    seconds: float = BUDGET_SECONDS,
) -> dict[str, dict[int, float]]:
    """Returns the times of candidates: seconds of all layers together, by the number of rows.

    outputs_by_depth: how many outputs all layers with so many inputs have together. seconds: how long it may take.
    """
    deadline = time.perf_counter() + seconds
    times = {name: dict.fromkeys(ROWS, 0.0) for name in candidates}
    for depth, outputs in outputs_by_depth.items():
        trials = {name: _Trial.of(name, depth, layer, dtype) for name in candidates}
        for rows in ROWS:
            x = torch.full((rows, depth), 0.01, dtype=dtype)
            best = dict.fromkeys(candidates, math.inf)
            for repeat in range(_REPEATS):
                if repeat and time.perf_counter() > deadline:
                    break
                for name, trial in trials.items():  # in turns, so that a busy moment hits all alike
                    best[name] = min(best[name], trial.seconds_an_output(x))
            for name in candidates:
                times[name][rows] += best[name] * outputs
    return times


@dataclass(frozen=True, slots=True)
class _Trial:
    """Layers of one depth with one kernel: a large one for few rows, and smaller ones for many."""

    by_outputs: Callable[[int], PackedLinear]
    most: int  # outputs

    @classmethod
    def of(cls, name: str, depth: int, layer: type[FloatLinear], dtype: torch.dtype) -> "_Trial":
        itemsize = 1 if layer is Int8Linear else dtype.itemsize
        most = max(TILE, _WEIGHT_BYTES // (depth * itemsize) // TILE * TILE)
        layers: dict[int, PackedLinear] = {}

        def by_outputs(outputs: int) -> PackedLinear:
            if outputs not in layers:
                weight = torch.full((outputs, depth), 0.01, dtype=dtype)
                layers[outputs] = OneDnnLinear(weight) if name == ONEDNN else layer(weight, None, KernelTable.of(name))
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


def _cache_file(outputs_by_depth: Mapping[int, int], layer: type[FloatLinear], dtype: torch.dtype) -> Path:
    facts = [sorted(outputs_by_depth.items()), layer.__name__, str(dtype), torch.get_num_threads(), ROWS]
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
