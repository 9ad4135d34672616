"""Measures how fast this machine reads memory and multiplies matrices, and what a model's linear layers ask of it.

python -m benchmarks.machine --model runs/synthetic/opt-125m
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.floor import Machine
from benchmarks.linears import linear_shapes
from benchmarks.timing import timed
from tgi_server.engine.config import DTYPES
from tgi_server.engine.linear.float import PackedLinear

_READ_BYTES = {"cpu": 1 << 30, "cuda": 1 << 33}
_MATRIX = {"cpu": 4096, "cuda": 8192}


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """The best of several attempts each, on all threads that torch uses."""
    return Machine(_bandwidth(device), _matrix_rate(device, dtype))


def _bandwidth(device: torch.device) -> float:
    """Bytes/s: of summing what is too large for any cache, or of copying it, whichever is more."""
    size = _READ_BYTES[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    reading = size / min(timed(source.sum, device))
    copying = 2 * size / min(timed(lambda: target.copy_(source), device))
    return max(reading, copying)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square product; on a CPU with the weights as they are, or packed, whichever is faster."""
    size = _MATRIX[device.type]
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    ways: list[Callable[[], object]] = [lambda: left @ right]
    if device.type == "cpu":
        packed = PackedLinear(right)
        ways.append(lambda: packed(left))
    return 2 * size**3 / min(min(timed(way, device)) for way in ways)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model folder; only its config.json is read")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    dtype = DTYPES[arguments.dtype]
    try:
        cost = linear_shapes(arguments.model).cost(dtype)
    except ValueError as error:
        sys.exit(f"error: {error}")
    machine = measure_machine(torch.device(arguments.device), dtype)
    print(json.dumps({"machine": asdict(machine), "cost": asdict(cost)}))


if __name__ == "__main__":
    torch.inference_mode()(main)()
