"""Measures where the time of a step goes on a CPU, and compares each part with the fastest that the machine allows.

    python -m benchmarks.roofline runs/synthetic/llama-360m
    python -m benchmarks.roofline model.gguf --rows 1 8 32 --prompt 512
    python -m benchmarks.roofline runs/synthetic/llama-360m --quantize int4 --layers

It first measures the machine's peaks, with one thread and with all: the rate of each multiply instruction that the
kernels use, and the bandwidth of caches and memory. It then prints a table for a prompt, and one for each number of
decoding rows. A table has the time, the floor and the share of the step for every part of the forward pass.

The floor of a linear layer is the time to read its weights from memory, or to do its multiplications at peak rate,
whichever is longer. The floor of attention is computed in the same way, with the KV cache in place of the weights.
"waiting for threads" is the time in which the thread that runs the pass waits for other threads; the rows above
include it. "outside of passes" is Python, sampling except for the argmax, and planning the next step.

With --layers it also measures single linear layers, by shape and number of rows, and compares them with oneDNN with
weights of 16 and 32 bits.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.bench import Bench
from benchmarks.peaks import Peaks, measure_peaks
from benchmarks.report import finish_run, number, table, tell
from benchmarks.workloads import positive
from tgi_server.engine.backends.cpu_model import CpuModel
from tgi_server.engine.backends.decoder import Decoder, inner
from tgi_server.engine.backends.head import PrefilteredHead
from tgi_server.engine.config import DTYPES, EngineConfig
from tgi_server.engine.engine import Engine
from tgi_server.engine.errors import EngineError
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear import PackedLinear
from tgi_server.engine.linear.kernel_linear import SideBySideLinear
from tgi_server.gguf.paths import SUFFIX
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.model_files.gguf_models import described

_STEPS = 32  # decoding steps, of which the mean is taken
_PROMPTS = 5
_ATTEMPTS = 7
_COLUMNS = ("part", "calls", "ms", "floor, ms", "x floor", "share")
_LAYER_COLUMNS = ("layer", "shape", "kernel", "rows", "us", "floor, us", "x floor", "oneDNN bf16, us", "f32, us")
# Linear layers by the names that the parts of passes have.
_LINEARS = ("qkv", "output", "mixer_in", "mixer_out", "up", "down")
_WAITING = "waiting for threads"
_BESIDE_BYTES = 64 << 20  # of oneDNN's weights: more than a cache has


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of a step: seconds in all its calls, and at least; None: nothing is known of its floor."""

    name: str
    calls: float
    seconds: float
    floor: float | None

    def row(self, step: float) -> list[str]:
        floor, times = (None, None) if self.floor is None else (self.floor * 1e3, self.seconds / self.floor)
        cells = [number(value) for value in (self.calls, self.seconds * 1e3, floor, times)]
        return [self.name, *cells, f"{self.seconds / step:.1%}"]


def linear_layers(decoder: Decoder) -> dict[str, list[PackedLinear]]:
    """Returns the linear layers by their names in passes."""
    layers = {name: [layer.linears.get(name) for layer in decoder.layers] for name in _LINEARS}
    named = {name: [inner(each) for each in found if each is not None] for name, found in layers.items()}
    return {name: found for name, found in named.items() if found} | {"head": [inner(decoder.head)]}


def weight_bytes(layer: PackedLinear, rows: int) -> int:
    """Returns what a pass reads: weights and scales, or the int8 copy of a head whose outputs it bounds."""
    if isinstance(layer, PrefilteredHead) and rows <= layer.prefilter["rows"]:
        return sum(value.nbytes for value in layer.prefilter.values() if isinstance(value, Tensor))
    return sum(value.nbytes for value in _tensors(layer))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        for name, each in [*vars(value).items(), *value._modules.items()]:
            if name.startswith("_") and name not in ("_buffers", "_parameters", "_modules", "_prefilter", "_parts"):
                yield from _tensors(each)


def linear_floor(layer: PackedLinear, rows: int, peaks: Peaks) -> float:
    """Returns seconds: of reading the weights, or of the products at the peak of the kernel's instruction."""
    if isinstance(layer, SideBySideLinear):
        return sum(linear_floor(part, rows, peaks) for part in cast(Iterable[PackedLinear], layer.parts))
    reading = weight_bytes(layer, rows) / peaks.reading["memory"].all
    peak = peaks.of_kernel(kernel_of(layer, rows))
    return reading if peak is None else max(reading, 2 * rows * layer.in_features * layer.out_features / peak.all)


def kernel_of(layer: Any, rows: int) -> str:
    """Returns the name of the kernel for this number of rows, and "" for a layer that is made of several ones."""
    return str(layer._table.at(rows)) if hasattr(layer, "_table") else ""


def attention_floor(model: CpuModel, queries: int, keys: int, pairs: int, peaks: Peaks) -> float:
    """Returns seconds for all layers.

    keys: how many are read in a layer, with their values. pairs: of a query and a key, in a layer.
    """
    seconds = 0.0
    size = model.attention.keys[0].element_size()
    peak = peaks.of_kernel("amx") or peaks.of_kernel("bf16") or peaks.of_kernel("fma")
    for layer in model.decoder.layers:
        if layer.heads is None or layer.variant is None:
            continue
        window = layer.variant.window or keys
        seen = min(1.0, window * queries / keys)
        elements = layer.heads.kv_heads * (layer.heads.size + layer.heads.value_size)
        products = 2 * layer.heads.heads * (layer.heads.size + layer.heads.value_size) * pairs * seen
        computing = products / peak.all if peak else 0.0
        seconds += max(keys * seen * elements * size / peaks.reading["memory"].all, computing)
    return seconds


def parts_of(
    measured: Mapping[str, Sequence[float]], steps: int, step: float, floors: Mapping[str, float]
) -> list[StepPart]:
    """Returns the parts of a step, the longest first. measured: calls and seconds in so many steps. step: seconds."""
    parts = [
        StepPart(name, calls / steps, seconds / steps, floors.get(name)) for name, (calls, seconds) in measured.items()
    ]
    whole = next(part for part in parts if part.name == "pass")
    inside = [part for part in parts if part.name not in ("pass", _WAITING)]
    inside.sort(key=lambda part: part.seconds, reverse=True)
    between = whole.seconds - sum(part.seconds for part in inside)
    waiting = [part for part in parts if part.name == _WAITING]
    outside = max(step - whole.seconds, 0.0)
    total = StepPart("step", 1, whole.seconds + outside, sum(floors.values()))
    return [
        *inside,
        StepPart("between parts", 0, between, None),
        StepPart("outside of passes", 0, outside, None),
        total,
        *waiting,
    ]


class Roofline:
    """Measures the parts of steps of one engine."""

    def __init__(self, engine: Engine, model: CpuModel, peaks: Peaks, prompt: int, most_rows: int) -> None:
        """prompt: tokens of each prompt, which are the context of decoding steps."""
        self._model, self._peaks, self._prompt = model, peaks, prompt
        self._layers = linear_layers(model.decoder)
        self._bench = Bench(engine, prompt, _STEPS, most_rows, prompt)

    def prefill(self) -> list[StepPart]:
        """Returns the parts of computing one prompt."""
        torch.ops.oatmill.measure_parts(True)
        step = self._bench.prefill_seconds(1, _PROMPTS)
        measured = torch.ops.oatmill.measure_parts(False)
        pairs = self._prompt * (self._prompt + 1) // 2
        floors = self._floors(self._prompt, 1, attention_floor(self._model, 1, self._prompt, pairs, self._peaks))
        return parts_of(measured, _PROMPTS + 1, step, floors)

    def decode(self, rows: int) -> list[StepPart]:
        """Returns the parts of a decoding step of so many rows."""
        step = self._bench.decode_seconds(rows, before=lambda: torch.ops.oatmill.measure_parts(True))
        measured = torch.ops.oatmill.measure_parts(False)
        keys = rows * (self._prompt + _STEPS // 2)
        floors = self._floors(rows, rows, attention_floor(self._model, rows, keys, keys, self._peaks))
        return parts_of(measured, _STEPS + 1, step, floors)

    def layers(self, numbers_of_rows: Sequence[int], dtype: torch.dtype) -> list[list[str]]:
        """Returns the rows of the table of linear layers, by shape and number of rows."""
        lines = []
        for name, layers in self._layers.items():
            first = layers[0]
            shape = first.in_features, first.out_features
            beside = {each: _dense_copies(*shape, each) for each in (torch.bfloat16, torch.float32)}
            for rows in numbers_of_rows:
                x = torch.randn(rows, first.in_features).to(dtype)
                own = _seconds(lambda layer, x: layer(x), layers, x)
                others = [
                    _seconds(lambda weight, x: linear(x, weight), each, x.to(kind)) for kind, each in beside.items()
                ]
                floor = linear_floor(first, rows, self._peaks)
                numbers = [number(value * 1e6) for value in (own, floor)]
                cells = [*numbers, number(own / floor), *(number(value * 1e6) for value in others)]
                lines.append([name, "{}x{}".format(*shape), kernel_of(first, rows), str(rows), *cells])
        return lines

    def _floors(self, rows: int, logits: int, attention: float) -> dict[str, float]:
        """Returns seconds. rows: of the linear layers. logits: rows of the head. attention: its floor."""
        floors = {
            name: sum(linear_floor(layer, logits if name == "head" else rows, self._peaks) for layer in layers)
            for name, layers in self._layers.items()
        }
        return floors | {"attention": attention}


def _dense_copies(inputs: int, outputs: int, dtype: torch.dtype) -> list[Tensor]:
    weight = torch.full((outputs, inputs), 0.01, dtype=dtype)
    return [weight, *(weight.clone() for _ in range(min(15, _BESIDE_BYTES // weight.nbytes)))]


def _seconds(work: Callable[[Any, Tensor], object], layers: Sequence[Any], x: Tensor) -> float:
    """Returns the median time of one of them: a round takes each once, so that none finds its weights in a cache."""
    times = []
    for _ in range(_ATTEMPTS):
        started = time.perf_counter()
        for layer in layers:
            work(layer, x)
        times.append((time.perf_counter() - started) / len(layers))
    return statistics.median(times)


def peak_table(peaks: Peaks) -> str:
    """Returns the table of what the machine can do at most."""
    rows = [(name, "G operations/s", each) for name, each in peaks.instructions.items()]
    rows += [(f"reading, {level}", "GB/s", each) for level, each in peaks.reading.items()]
    cells = [[name, unit, number(each.one / 1e9), number(each.all / 1e9)] for name, unit, each in rows]
    return table(("peak", "unit", "1 thread", f"{peaks.threads} threads"), cells)


@torch.inference_mode()
def _run(arguments: argparse.Namespace) -> dict[str, object]:
    if not load_kernels():
        raise ValueError("there are no kernels to measure")
    tell("peaks")
    peaks = measure_peaks(torch.get_num_threads())
    print(peak_table(peaks), flush=True)
    path, dtype = arguments.model, DTYPES[arguments.dtype]
    if path.suffix == SUFFIX:
        path = described(path)
    config = EngineConfig(path, dtype, torch.device("cpu"), quantize=arguments.quantize,
                          linear_kernels=arguments.linear_kernels)  # fmt: skip
    engine = Engine(config)
    model = getattr(engine._runner, "model", None)
    if not isinstance(model, CpuModel):
        raise ValueError(f"{arguments.model} does not run in one kernel call, so its parts are not measured")
    roofline = Roofline(engine, model, peaks, arguments.prompt, max(arguments.rows))
    print(f"\n{arguments.model}, {arguments.dtype}, linear layers: {engine.info.linear_kernels}")
    steps = {}
    for title, measure in [
        (f"a prompt of {arguments.prompt} tokens", roofline.prefill),
        *(
            (f"{rows} rows, context {arguments.prompt}", lambda rows=rows: roofline.decode(rows))
            for rows in arguments.rows
        ),
    ]:
        tell(title)
        steps[title] = parts = measure()
        step = next(part.seconds for part in parts if part.name == "step")
        print(f"\n{title}\n\n{table(_COLUMNS, [part.row(step) for part in parts])}", flush=True)
    layers = []
    if arguments.layers:
        tell("linear layers")
        layers = roofline.layers([*arguments.rows, arguments.prompt], dtype)
        print(f"\n{table(_LAYER_COLUMNS, layers)}")
    return {"model": str(arguments.model), "peaks": peaks, "steps": steps, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder or a GGUF file")
    parser.add_argument(
        "--rows", type=positive, nargs="+", default=[1, 8, 32], help="decoding rows of a step (default: %(default)s)"
    )
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--quantize", metavar="WAY", help="as the server's flag of this name")
    parser.add_argument("--linear-kernels", metavar="NAMES", help="as the server's flag of this name")
    parser.add_argument("--layers", action="store_true", help="also measure single linear layers, and oneDNN")
    parser.add_argument("--threads", type=positive, help="threads of torch; default: one for each core")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the results to this JSON file")
    arguments = parser.parse_args()
    finish_run(_run, arguments, EngineError, ModelUnavailable, ValueError, RuntimeError)


if __name__ == "__main__":
    main()
