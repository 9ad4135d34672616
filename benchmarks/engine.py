"""Measures the engine alone, without a server: prompts and decoding steps, beside what they cannot be faster than.

    python -m benchmarks.engine runs/synthetic/opt-125m
    python -m benchmarks.engine runs/synthetic/llama-360m --batch 8 --context 512 --profile
    python -m benchmarks.engine runs/synthetic/llama-360m --quantize int4 --linear-kernels w4a8
    python -m benchmarks.engine runs/synthetic/opt-125m --extras adapter adapters json
    python -m benchmarks.engine llama-8b --batch 1 32 256 --context 1024 --prefill-tokens 8192      on a GPU

MODEL is a folder, a GGUF file, or the name of a synthetic model, whose weights are then made on the device. "floor" is
the longer of reading weights and KV cache from memory and computing all products, both at the speed that this run
measures first.
With --extras, decoding steps are measured in which every sequence has an adapter (all the same one, or 8 in turns; they
lie in MODEL-adapters) or a JSON grammar, in turns with steps without.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.bench import EXTRAS, Bench
from benchmarks.floor import Machine, ModelCost
from benchmarks.machine import cost_of, measure_machine, read_config
from benchmarks.report import finish_run, number, table, tell
from benchmarks.synthetic import MODELS, build_model, round_weights
from benchmarks.workloads import positive
from tgi_server.engine.config import DTYPES, EngineConfig
from tgi_server.engine.engine import Engine
from tgi_server.engine.errors import EngineError
from tgi_server.gguf.paths import SUFFIX
from tgi_server.model_files.gguf_models import described

_ATTEMPTS = 3
_COLUMNS = ("step", "batch", "tokens", "tokens/s", "engine, ms", "floor, ms", "x floor")
_EXTRA_COLUMNS = ("every row has", "batch", "without, ms", "with, ms", "ratio", "range")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One kind of step. tokens: computed in it; times in seconds, medians of several."""

    step: str
    batch: int
    tokens: int
    engine: float
    floor: float

    def row(self) -> list[str]:
        times = (self.tokens / self.engine, self.engine * 1e3, self.floor * 1e3, self.engine / self.floor)
        return [self.step, str(self.batch), str(self.tokens), *map(number, times)]


def measure(
    bench: Bench, cost: ModelCost, machine: Machine, batch: int, context: int, clock: Callable[[], float]
) -> list[Measurement]:
    """Measures the prefill of `batch` prompts of `context` tokens, and the decoding step after it."""
    prefill, decode = bench.prefill_seconds(batch, _ATTEMPTS, clock), bench.decode_seconds(batch, clock=clock)
    return [
        Measurement("prefill", batch, batch * context, prefill, cost.prefill_seconds(machine, batch, context)),
        Measurement("decode", batch, batch, decode, cost.decode_seconds(machine, batch, context)),
    ]


@dataclass(frozen=True, slots=True)
class ExtraMeasurement:
    """A decoding step in which all rows have something, and one without: seconds of each, by round."""

    extra: str
    batch: int
    without: list[float]
    having: list[float]

    def row(self) -> list[str]:
        ratios = [one / other for one, other in zip(self.without, self.having, strict=True)]
        times = (statistics.median(each) * 1e3 for each in (self.without, self.having))
        middle, spread = number(statistics.median(ratios)), f"{number(min(ratios))}-{number(max(ratios))}"
        return [self.extra, str(self.batch), *map(number, times), middle, spread]


def measure_extras(bench: Bench, arguments: argparse.Namespace) -> list[ExtraMeasurement]:
    """Measures steps without and with each of the extras, one after the other in every round."""
    clock, measured = _clock(arguments), []
    for batch in arguments.batch:
        tell(f"batch {batch}")
        rounds = [
            [bench.decode_seconds(batch, extra, clock) for extra in (None, *arguments.extras)]
            for _ in range(arguments.rounds)
        ]
        without, *others = (list(times) for times in zip(*rounds, strict=True))
        measured += [
            ExtraMeasurement(extra, batch, without, having)
            for extra, having in zip(arguments.extras, others, strict=True)
        ]
    return measured


def _clock(arguments: argparse.Namespace) -> Callable[[], float]:
    return time.process_time if arguments.processor_time else time.perf_counter


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a model folder, a GGUF file, or one of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 32, 40], help="default: %(default)s")
    parser.add_argument("--context", type=positive, default=128, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--steps", type=positive, default=32, help="decoding steps to measure (default: %(default)s)")
    parser.add_argument("--prefill-tokens", type=positive, help="prompt tokens of one step (default: all of a batch)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--quantize", metavar="WAY", help="rounds weights as the server's flag of this name")
    parser.add_argument("--linear-kernels", metavar="NAMES", help="as the server's flag of this name")
    parser.add_argument("--packed-weights-cache", type=Path, metavar="FOLDER", help="as the server's; default: none")
    parser.add_argument("--device", type=torch.device, help="default: cuda if there is one, else cpu")
    parser.add_argument("--threads", type=int, help="of torch; default: one for each core")
    parser.add_argument("--extras", nargs="+", choices=EXTRAS, help="measure decoding steps whose rows have these")
    parser.add_argument("--rounds", type=positive, default=5, help="of --extras (default: %(default)s)")
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure by processor time, for a busy machine; use it with --threads 1",
    )
    parser.add_argument("--profile", action="store_true", help="print what the time goes to, by torch.profiler")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    return parser.parse_args()


@torch.inference_mode()
def _run(arguments: argparse.Namespace) -> dict[str, object]:
    dtype, folder = DTYPES[arguments.dtype], Path(arguments.model)
    if folder.suffix == SUFFIX:
        folder = described(folder)
    made_here = arguments.model in MODELS and not folder.exists()
    shape = MODELS[arguments.model].config if made_here else read_config(folder)
    cost = cost_of(shape, dtype)
    device = arguments.device or EngineConfig(folder).device
    config = EngineConfig(
        folder,
        dtype,
        device,
        quantize=arguments.quantize,
        linear_kernels=arguments.linear_kernels,
        packed_cache=arguments.packed_weights_cache,
    )
    machine = measure_machine(device, dtype)
    with tempfile.TemporaryDirectory() as empty:
        model = build_model(shape, device, dtype) if made_here else None
        if model is not None and arguments.quantize:
            cost = replace(cost, weight_bytes=cost.weight_bytes - round_weights(model, arguments.quantize))
        engine = Engine(replace(config, model_path=Path(empty) if made_here else folder), model)
    where = f"{engine.info.dtype} on {engine.info.device_type}, {torch.get_num_threads()} threads"
    where += f", linear layers: {engine.info.linear_kernels}" if arguments.quantize else ""
    print(f"{arguments.model}, prompts of {arguments.context} tokens, {where}; {machine.describe()}", flush=True)
    bench = Bench(engine, arguments.context, arguments.steps, max(arguments.batch), arguments.prefill_tokens)
    settings = {"model": arguments.model, "context": arguments.context, "where": where}
    if arguments.extras:
        if {"adapter", "adapters"} & set(arguments.extras):
            bench.load_adapters(folder.with_name(f"{folder.name}-adapters"))
        extras = measure_extras(bench, arguments)
        print(table(_EXTRA_COLUMNS, [each.row() for each in extras]))
        return {**settings, "machine": machine, "extras": extras}
    measurements: list[Measurement] = []
    for batch in arguments.batch:
        tell(f"batch {batch}")
        measurements += measure(bench, cost, machine, batch, arguments.context, _clock(arguments))
        if arguments.profile:
            bench.profile(batch)
    measurements.sort(key=lambda measurement: measurement.step, reverse=True)
    print(table(_COLUMNS, [measurement.row() for measurement in measurements]))
    return {**settings, "machine": machine, "cost": cost, "steps": measurements}


def main() -> None:
    arguments = _arguments()
    finish_run(_run, arguments, EngineError, ValueError, RuntimeError)


if __name__ == "__main__":
    main()
