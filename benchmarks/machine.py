"""Measures how fast this machine reads memory and multiplies matrices, and says what a model asks of it.

python -m benchmarks.machine --model runs/synthetic/opt-125m
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks.floor import Machine, ModelCost
from tgi_server.engine.config import DTYPES
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.onednn import OneDnnLinear, has_products
from tgi_server.gguf.paths import SUFFIX
from tgi_server.model_files.errors import ModelUnavailable
from tgi_server.model_files.gguf_models import described

_READ_BYTES = {"cpu": 1 << 30, "cuda": 1 << 33}
_MATRIX = {"cpu": 4096, "cuda": 8192}
_ATTEMPTS = 5


def read_config(path: Path) -> PretrainedConfig:
    """Returns the configuration of a folder or a GGUF file. Raises ValueError if there is no model."""
    if path.suffix == SUFFIX:
        try:
            path = described(path)
        except ModelUnavailable as error:
            raise ValueError(str(error)) from error
    if not (path / "config.json").is_file():
        raise ValueError(f"no model in {path}; `python -m benchmarks.synthetic` writes some")
    return AutoConfig.from_pretrained(path, local_files_only=True)


def cost_of(config: PretrainedConfig, dtype: torch.dtype) -> ModelCost:
    """Counts the model's linear layers, of experts those of one token, and its KV cache; no weights are made.

    Raises ValueError without such layers.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight.numel()
    layers = sum(each.weight.numel() for each in model.modules() if type(each) is nn.Linear) - head
    if layers <= 0:
        raise ValueError(f"a model of type {config.model_type} has no layers of the kind nn.Linear")
    # Weights of experts have one dimension more. A token reads, and computes with, those of its own.
    of_one = sum(each.numel() // len(each) for each in model.parameters() if each.dim() == 3)
    layers += of_one * getattr(config, "num_experts_per_tok", 0)
    heads, depth = config.num_attention_heads, config.num_hidden_layers
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return ModelCost(
        weight_bytes=(layers + head) * dtype.itemsize,
        layer_flops=2 * layers,
        head_flops=2 * head,
        kv_bytes=2 * depth * kv_heads * (config.hidden_size // heads) * dtype.itemsize,
        attention_flops=4 * depth * config.hidden_size,
    )


def measure_machine(device: torch.device, dtype: torch.dtype) -> Machine:
    """Returns the best of several attempts each, on all threads that torch uses."""
    return Machine(_bandwidth(device), _matrix_rate(device, dtype))


def synchronise(device: torch.device) -> None:
    """Waits until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bandwidth(device: torch.device) -> float:
    """Returns bytes/s: of summing what is too large for any cache, or of copying it, whichever is more."""
    size = _READ_BYTES[device.type]
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return size * max(1 / _seconds(source.sum, device), 2 / _seconds(lambda: target.copy_(source), device))


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Returns FLOP/s of a square product; on a CPU with the weights as they are, or packed, whichever is faster."""
    size = _MATRIX[device.type]
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    ways: list[Callable[[], object]] = []
    if device.type != "cpu" or has_products(dtype):
        ways.append(lambda: left @ right)
    if device.type == "cpu":
        layers = [OneDnnLinear(right), *([FloatLinear(right)] if FloatLinear.supports(dtype) else [])]
        ways += [partial(layer, left) for layer in layers]
    return 2 * size**3 / min(_seconds(way, device) for way in ways)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the least of several runs, after one that does not count."""
    times = []
    for _ in range(_ATTEMPTS + 1):
        synchronise(device)
        started = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - started)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, required=True, help="a folder, of which only config.json is read, or a GGUF file"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    arguments = parser.parse_args()
    dtype = DTYPES[arguments.dtype]
    try:
        cost = cost_of(read_config(arguments.model), dtype)
        if arguments.model.suffix == SUFFIX:  # whose quantized weights are read as they are
            cost = replace(cost, weight_bytes=arguments.model.stat().st_size)
    except ValueError as error:
        sys.exit(f"error: {error}")
    print(json.dumps({"machine": asdict(measure_machine(torch.device(arguments.device), dtype)), "cost": asdict(cost)}))


if __name__ == "__main__":
    torch.inference_mode()(main)()
