"""Measures the engine alone, without a server: prompts and decoding steps, beside what they cannot be faster than.

    python -m benchmarks.engine runs/synthetic/opt-125m
    python -m benchmarks.engine runs/synthetic/llama-360m --batch 8 --context 512 --profile

"linears" is the time of the model's linear layers with nothing around them, "floor" the longer of reading their
weights from memory and computing their products, both at the speed that this run measures first.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.floor import Machine, ModelCost
from benchmarks.linears import BareLinears, linear_shapes
from benchmarks.machine import measure_machine
from benchmarks.report import number, table
from benchmarks.timing import synchronise
from tgi_server.engine.config import DTYPES, EngineConfig
from tgi_server.engine.engine import Engine
from tgi_server.engine.errors import EngineError
from tgi_server.engine.models.runner import Capacity
from tgi_server.engine.parameters import StoppingParameters
from tgi_server.engine.sequence import Sequence

_BATCH_ID = 1
_PROFILED_STEPS = 8
_COLUMNS = ("step", "batch", "tokens", "tokens/s", "engine, ms", "linears, ms", "floor, ms", "x linears", "x floor")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kind of step. tokens: computed in a step; times in seconds, the medians of several."""

    step: str
    batch: int
    tokens: int
    engine: float
    linears: float
    floor: float

    def row(self) -> list[str]:
        times = [number(seconds * 1e3) for seconds in (self.engine, self.linears, self.floor)]
        ratios = [number(self.engine / self.linears), number(self.engine / self.floor)]
        return [self.step, str(self.batch), str(self.tokens), number(self.tokens / self.engine), *times, *ratios]


class Bench:
    """Runs batches of random prompts of equal length through an engine."""

    def __init__(self, engine: Engine, context: int, steps: int, max_batch_size: int) -> None:
        """context: tokens of each prompt. steps: decoding steps that are measured."""
        self._engine = engine
        self._context = context
        self._steps = steps
        total = context + steps + _PROFILED_STEPS + 3
        self._capacity: Capacity = engine.warm_up(max_batch_size, max_batch_size * context, total)
        self._tokens = total
        self._device = torch.device(engine.info.device_type)

    def prefill_seconds(self, batch: int, attempts: int) -> float:
        """One step that computes all prompts of a batch; the median of some attempts, after one that is not counted."""
        return statistics.median([self._prefill(batch) for _ in range(attempts + 1)][1:])

    def decode_seconds(self, batch: int) -> float:
        """A step in which every sequence gets a token; the next one is started before the last one's are read."""
        self._prefill(batch)
        times = []
        running = self._engine.decode(_BATCH_ID)
        for _ in range(self._steps):
            started = time.perf_counter()
            following = self._engine.decode(_BATCH_ID)
            running.collect()
            running = following
            times.append(time.perf_counter() - started)
        running.collect()
        return statistics.median(times)

    def profile(self, batch: int) -> None:
        """Prints what the time of a batch's prompts, and then of its decoding steps, goes to."""
        with _profiled(f"prefill of {batch} x {self._context} tokens"):
            self._prefill(batch)
        with _profiled(f"{_PROFILED_STEPS} decoding steps of {batch} sequences"):
            for _ in range(_PROFILED_STEPS):
                self._engine.decode(_BATCH_ID).collect()

    def _prefill(self, batch: int) -> float:
        self._engine.clear()
        sequences = [self._sequence(index) for index in range(batch)]
        chunks = [(sequence.request_id, self._context) for sequence in sequences]
        synchronise(self._device)
        started = time.perf_counter()
        self._engine.prefill(_BATCH_ID, sequences, chunks).collect()
        return time.perf_counter() - started

    def _sequence(self, index: int) -> Sequence:
        vocabulary = range(self._engine.info.vocab_size)
        prompt = Random(index).choices(vocabulary, k=self._context)
        blocks: list[int] = []
        if self._engine.info.paged:
            count = -(-self._tokens // self._capacity.block_size)
            blocks = list(range(1 + index * count, 1 + (index + 1) * count))
        return Sequence(index, prompt, StoppingParameters(self._tokens, ignore_eos=True), blocks=blocks)


@contextmanager
def _profiled(title: str) -> Iterator[None]:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        yield
    order = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    print(f"\n{title}\n{profiler.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=48)}")


def measure(
    bench: Bench, linears: BareLinears, cost: ModelCost, machine: Machine, batch: int, tokens: int
) -> list[Measurement]:
    """The prefill of a batch, `tokens` in all its prompts, and its decoding step."""
    measurements = []
    for step, count, seconds in (
        ("prefill", tokens, bench.prefill_seconds(batch, attempts=3)),
        ("decode", batch, bench.decode_seconds(batch)),
    ):
        bare = statistics.median(linears.times(count, logits_rows=batch))
        measurements.append(Measurement(step, batch, count, seconds, bare, cost.pass_seconds(machine, count, batch)))
    return measurements


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 40], help="default: %(default)s")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="decoding steps to measure (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--device", type=torch.device, help="default: cuda if there is one, else cpu")
    parser.add_argument("--threads", type=int, help="of torch; default: one for each core")
    parser.add_argument("--profile", action="store_true", help="print what the time goes to, by torch.profiler")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    if min(*arguments.batch, arguments.context, arguments.steps) < 1:
        parser.error("--batch, --context and --steps are at least 1")
    return arguments


@torch.inference_mode()
def _run(arguments: argparse.Namespace) -> dict[str, object]:
    dtype = DTYPES[arguments.dtype]
    shapes = linear_shapes(arguments.model)
    cost = shapes.cost(dtype)
    engine = Engine(EngineConfig(arguments.model, dtype=dtype, device=arguments.device))
    device = torch.device(engine.info.device_type)
    machine = measure_machine(device, dtype)
    where = f"{engine.info.dtype} on {engine.info.device_type}, {torch.get_num_threads()} threads"
    print(f"{arguments.model}, prompts of {arguments.context} tokens, {where}; {machine.describe()}", flush=True)
    bench = Bench(engine, arguments.context, arguments.steps, max(arguments.batch))
    linears = BareLinears(shapes, device, dtype)
    measurements: list[Measurement] = []
    for batch in arguments.batch:
        print(f"batch {batch}", file=sys.stderr, flush=True)
        measurements += measure(bench, linears, cost, machine, batch, batch * arguments.context)
        if arguments.profile:
            bench.profile(batch)
    measurements.sort(key=lambda measurement: measurement.step, reverse=True)
    print(table(_COLUMNS, [measurement.row() for measurement in measurements]))
    return {
        "model": str(arguments.model),
        "context": arguments.context,
        "dtype": arguments.dtype,
        "device": engine.info.device_type,
        "threads": torch.get_num_threads(),
        "machine": asdict(machine),
        "cost": asdict(cost),
        "steps": [asdict(measurement) for measurement in measurements],
    }


def main() -> None:
    arguments = _arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        result = json.dumps(_run(arguments))
    except (EngineError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(result)
    if arguments.output:
        arguments.output.write_text(result + "\n")


if __name__ == "__main__":
    main()
