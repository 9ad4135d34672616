"""Measures the engine on a GPU beside `generate_batch` of `transformers` and beside the floor, on synthetic weights.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --point decode-1 --no-peer
    python -m benchmarks.gpu --small --device cpu      tries the measurements themselves, on any machine

Weights are made on the device. The floor is weights and KV cache over the bandwidth, or FLOPs over the matrix rate,
both as this run measures them. Prints a table, and as the last line the same as JSON.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from benchmarks import gpu_points, large_model
from benchmarks.floor import Machine
from benchmarks.gpu_points import Load, Point, peer_seconds, prompts
from benchmarks.machine import measure_machine
from benchmarks.report import number, table
from tgi_server.engine.config import DTYPES, EngineConfig
from tgi_server.engine.engine import Engine
from tgi_server.engine.errors import EngineError

POINTS = ("decode-1", "batch", "second-turn", "prefill")
T = TypeVar("T")
COLUMNS = ("what", "ours", "transformers", "floor", "unit", "value", "target", "met")


def measure(arguments: argparse.Namespace, load: Load) -> list[Point]:
    """The chosen points; one that fails is told on standard error and left out."""
    device, dtype = arguments.device, DTYPES[arguments.dtype]
    machine = measure_machine(device, dtype)
    print(f"{_name(device)}, {arguments.dtype}; {machine.describe()}", flush=True)
    model = large_model.build(large_model.SMALL if arguments.small else large_model.LLAMA_8B, device, dtype)
    shape = large_model.shape_of(model)
    peers = {} if arguments.no_peer else _peers(model, arguments.point, load)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(EngineConfig(Path(folder), dtype=dtype, device=device), model)
        points = []
        for name, run in _runs(engine, shape, machine, load).items():
            if name in arguments.point and (point := _attempt(name, run)) is not None:
                points.append(with_peer(point, peers.get(name)))
    return points


def with_peer(point: Point, peer: float | None) -> Point:
    """peer: what `transformers` takes, in the point's unit."""
    if peer is None:
        return point
    aim = f", to be {number(point.times_peer)} times" if point.times_peer else ""
    return replace(point, peer=peer, note=f"{number(peer / point.ours)} times as fast as generate_batch" + aim)


def row(point: Point) -> list[str]:
    sign = "<=" if point.lower else ">="
    numbers = [number(each) for each in (point.ours, point.peer, point.floor)]
    return [
        point.name,
        *numbers,
        point.unit,
        number(point.value),
        f"{sign} {point.target}",
        "yes" if point.met else "NO",
    ]


def _runs(engine: Engine, shape: large_model.Shape, machine: Machine, load: Load) -> dict[str, Callable[[], Point]]:
    return {
        "decode-1": partial(gpu_points.decode_one, engine, shape, machine, load),
        "batch": partial(gpu_points.decode_many, engine, shape, machine, load),
        "second-turn": partial(gpu_points.second_turn, engine, load),
        "prefill": partial(gpu_points.prefill_long, engine, shape, machine, load),
    }


def _peers(model: PreTrainedModel, points: list[str], load: Load) -> dict[str, float | None]:
    """Before the engine changes the model. Each number in the unit of its point."""
    vocab_size = model.config.vocab_size
    one = partial(peer_seconds, model, prompts(1, load.context, vocab_size), load.new_tokens)
    many = partial(peer_seconds, model, prompts(load.requests, load.context, vocab_size), load.new_tokens)
    own = model.config._attn_implementation
    seconds = {
        name: _attempt(f"generate_batch, {name}", run)
        for name, run in (("decode-1", one), ("batch", many))
        if name in points
    }
    model.set_attn_implementation(own)
    if (alone := seconds.get("decode-1")) is not None:
        seconds["decode-1"] = alone / load.new_tokens * 1e3
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return seconds


def _attempt(name: str, run: Callable[[], T]) -> T | None:
    try:
        return run()
    except (EngineError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"{name} failed: {type(error).__name__}: {reason}", file=sys.stderr, flush=True)
        return None


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", nargs="+", choices=POINTS, default=list(POINTS), help="default: all")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda"), help="default: %(default)s")
    parser.add_argument("--small", action="store_true", help="a tiny model and short prompts")
    parser.add_argument("--no-peer", action="store_true", help="leave generate_batch of transformers out")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    if arguments.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU; `--small --device cpu` tries the measurements themselves")
    return arguments


def main() -> None:
    arguments = _arguments()
    points = measure(arguments, gpu_points.SMALL if arguments.small else gpu_points.FULL)
    print(table(COLUMNS, [row(point) for point in points]))
    for point in points:
        if point.note:
            print(f"{point.name}: {point.note}")
    result = json.dumps([asdict(point) | {"met": point.met} for point in points])
    print(result)
    if arguments.output:
        arguments.output.write_text(result + "\n")
    if len(points) < len(arguments.point):
        sys.exit(1)


if __name__ == "__main__":
    main()
