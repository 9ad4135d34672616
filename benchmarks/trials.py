"""Times kernels of linear layers on this machine, for the table in the repository."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.choice import Weights
from tgi_server.engine.linear.kernel_linear import TILE
from tgi_server.engine.linear.kernel_table import KernelTable

# Numbers of rows that are timed. A table says nothing finer.
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
# A kernel takes over from the one for more rows only if it is WORTH times as fast: below that it may be noise. From
# many rows down, since more time is lost with many.
WORTH = 1.1
BUDGET_SECONDS = 1.5
# Bytes of weights that are timed, of all candidates together: enough that they come from memory, as the model's do, not
# from a cache.
_WEIGHT_BYTES = 48 << 20
# Operations of one measurement with many rows: more would not change which kernel is the fastest.
_OPERATIONS = 2e8
_REPEATS = 5
# Seconds of all layers together, by the number of rows.
Times = Mapping[int, float]


def choose(times: Mapping[str, Times]) -> KernelTable:
    """Returns the fastest table by these times of kernels; the first kernel is the default."""
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

    outputs_by_depth: by the number of inputs, the outputs of all layers with that number together. candidates: weights,
    all for inputs of one dtype, and the kernel that multiplies them. seconds: how long it may take.
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
            # In turns, so that a busy moment affects all kernels alike, and none finds its weights in a cache.
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
