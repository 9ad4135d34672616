"""Measures the engine alone, without a server: prompts and decoding steps, beside what they cannot be faster than.

    python -m benchmarks.engine runs/synthetic/opt-125m
    python -m benchmarks.engine runs/synthetic/llama-360m --batch 8 --context 512 --profile
    python -m benchmarks.engine runs/synthetic/opt-125m --num-shard 2
    python -m benchmarks.engine runs/synthetic/opt-125m --batch 1 2 8 --grammars

"linears" is the time of the model's linear layers with nothing around them, "floor" the longer of reading their
weights from memory and computing their products, both at the speed that this run measures first.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.bench import Bench
from benchmarks.floor import Machine, ModelCost
from benchmarks.linears import BareLinears, linear_shapes
from benchmarks.machine import measure_machine
from benchmarks.report import number, table
from benchmarks.shards import COLUMNS, Job, ShardedMeasurement, measure_shards
from tgi_server.engine.config import DTYPES, EngineConfig
from tgi_server.engine.engine import Engine
from tgi_server.engine.errors import EngineError

_GRAMMAR_ROUNDS = 15
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


@dataclass(frozen=True, slots=True)
class GrammarMeasurement:
    """A decoding step of a batch of which nobody, one or everybody has a grammar: medians, in seconds."""

    batch: int
    nobody: float
    one: float
    everybody: float

    def row(self) -> list[str]:
        times = [self.nobody, self.one, self.everybody]
        return [
            str(self.batch),
            *(number(seconds * 1e3) for seconds in times),
            *(number(seconds / self.nobody) for seconds in times[1:]),
        ]


def measure_grammars(bench: Bench, batch: int) -> GrammarMeasurement:
    """In turns, since the machine is not equally fast at all times."""
    having = (0, 1, batch)
    rounds = [[bench.decode_seconds(batch, grammars) for grammars in having] for _ in range(_GRAMMAR_ROUNDS)]
    return GrammarMeasurement(batch, *(statistics.median(times) for times in zip(*rounds, strict=True)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 40], help="default: %(default)s")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=32, help="decoding steps to measure (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--device", type=torch.device, help="default: cuda if there is one, else cpu")
    parser.add_argument("--threads", type=int, help="of torch; default: one for each core")
    parser.add_argument("--num-shard", type=int, default=1, help="measure the model split over so many processes, too")
    parser.add_argument("--grammars", action="store_true", help="measure decoding with grammars instead")
    parser.add_argument("--profile", action="store_true", help="print what the time goes to, by torch.profiler")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    if min(*arguments.batch, arguments.context, arguments.steps, arguments.num_shard) < 1:
        parser.error("--batch, --context, --steps and --num-shard are at least 1")
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
    if arguments.grammars:
        return _grammars(bench, arguments)
    linears = BareLinears(shapes, device, dtype)
    measurements: list[Measurement] = []
    for batch in arguments.batch:
        print(f"batch {batch}", file=sys.stderr, flush=True)
        measurements += measure(bench, linears, cost, machine, batch, batch * arguments.context)
        if arguments.profile:
            bench.profile(batch)
    measurements.sort(key=lambda measurement: measurement.step, reverse=True)
    print(table(_COLUMNS, [measurement.row() for measurement in measurements]))
    sharded = _shards(arguments, engine, measurements) if arguments.num_shard > 1 else []
    return {
        "model": str(arguments.model),
        "context": arguments.context,
        "dtype": arguments.dtype,
        "device": engine.info.device_type,
        "threads": torch.get_num_threads(),
        "machine": asdict(machine),
        "cost": asdict(cost),
        "steps": [asdict(measurement) for measurement in measurements],
        "shards": arguments.num_shard,
        "sharded_steps": [asdict(measurement) for measurement in sharded],
    }


def _grammars(bench: Bench, arguments: argparse.Namespace) -> dict[str, object]:
    measurements = [measure_grammars(bench, batch) for batch in arguments.batch]
    columns = ("batch", "no grammar, ms", "one, ms", "all, ms", "one / no", "all / no")
    print(table(columns, [measurement.row() for measurement in measurements]))
    return {"model": str(arguments.model), "grammars": [asdict(measurement) for measurement in measurements]}


def _shards(arguments: argparse.Namespace, engine: Engine, alone: list[Measurement]) -> list[ShardedMeasurement]:
    """Prints the same steps of the split model beside those of the whole one."""
    print(f"split over {arguments.num_shard} shards", file=sys.stderr, flush=True)
    config = EngineConfig(arguments.model, dtype=DTYPES[arguments.dtype], device=torch.device(engine.info.device_type))
    job = Job(config, arguments.batch, arguments.context, arguments.steps, arguments.threads)
    measurements = measure_shards(job, arguments.num_shard)
    measurements.sort(key=lambda measurement: measurement.step, reverse=True)
    seconds = {(each.step, each.batch): each.engine for each in alone}
    print(f"\n{arguments.num_shard} shards; collectives: time in them, and how many, of a step of shard 0")
    print(table(COLUMNS, [each.row(seconds[each.step, each.batch]) for each in measurements]))
    return measurements


def main() -> None:
    arguments = _arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        result = json.dumps(_run(arguments))
    except (EngineError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print(result)
    if arguments.output:
        arguments.output.write_text(result + "\n")


if __name__ == "__main__":
    main()
