"""Measures the CPU's kernels alone: linear layers beside oneDNN, and attention over a prompt beside torch.

    python -m benchmarks.kernels runs/synthetic/opt-125m
    ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.kernels runs/synthetic/llama-360m --dtype float16 --threads 2
    python -m benchmarks.kernels runs/synthetic/llama-360m --weights int8 int4 codebook --rows 1 4 32 128 512

Milliseconds of all layers of the model, by the number of rows, and of one layer's attention, by the prompt's tokens.
With --weights, layers with quantised weights stand beside dense ones. What stands side by side is measured in
turns; the least of several times counts.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks.machine import read_config
from benchmarks.report import finish, number, table, tell
from benchmarks.workloads import positive
from tgi_server.engine.backends.attention.base import AttentionVariant, ChunkSpan, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.config import DTYPES
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear import choice
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.int8 import Int8Linear
from tgi_server.engine.linear.onednn import OneDnnLinear

_BUDGET_SECONDS = 60.0
_ATTEMPTS = 7


def linear_times(
    config: PretrainedConfig, dtype: torch.dtype, kinds: Sequence[str], numbers_of_rows: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Returns the seconds of all layers but the head, by kernel and number of rows. kinds: of quantised weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    outputs: Counter[int] = Counter()
    for layer in model.modules():
        if type(layer) is nn.Linear and layer is not head:
            outputs[layer.in_features] += layer.out_features
    plain = choice.Weights.plain(FloatLinear, dtype)
    candidates = {name: (plain, name) for name in plain.kernels}
    for kind in kinds:
        rounded = kind == "int8"  # as --quantize int8 does: the inputs, too
        weights = choice.Weights.plain(Int8Linear, dtype) if rounded else choice.Weights.quantized(kind, dtype)
        candidates |= {f"{kind}: {name}": (weights, name) for name in (*weights.kernels, *weights.by_name)}
    onednn = replace(
        plain, make=lambda outputs, inputs, _: OneDnnLinear(torch.full((outputs, inputs), 0.01, dtype=dtype))
    )
    # apart: its threads keep the cores busy behind a loop
    times = [{"onednn": (onednn, "onednn")}, candidates]
    return {
        name: seconds
        for each in times
        for name, seconds in choice.measure(outputs, each, numbers_of_rows, seconds=_BUDGET_SECONDS).items()
    }


def attention_times(config: PretrainedConfig, dtype: torch.dtype, tokens: int) -> dict[str, float]:
    """Returns the seconds of one layer's attention over a prompt."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    query, key, value = (torch.randn(tokens, count, size).to(dtype) for count in (heads, kv_heads, kv_heads))
    backend = CpuAttention(KVShape((kv_heads,), size), torch.device("cpu"), dtype)
    blocks = -(-tokens // backend.block_size)
    backend.allocate(blocks + 1)
    metadata = ForwardMetadata(
        slots=torch.arange(tokens) + backend.block_size,
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32)[None],
        kv_lengths=torch.tensor([tokens], dtype=torch.int32),
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        decoding=0,
        chunks=[ChunkSpan(0, tokens, tokens)],
        max_kv_length=tokens,
    )
    backend.write(0, key, value, metadata)
    dense = [each.transpose(0, 1)[None].contiguous() for each in (query, key, value)]
    wide = [each.float() for each in dense]

    def by_torch(parts: list[torch.Tensor]) -> torch.Tensor:
        return scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=heads != kv_heads)

    return _least(
        {
            "own": lambda: backend.attend(0, query, metadata, AttentionVariant(size**-0.5)),
            "torch": lambda: by_torch(dense),
            "torch, float32": lambda: by_torch(wide),
        }
    )


def _least(works: Mapping[str, Callable[[], torch.Tensor]]) -> dict[str, float]:
    least = dict.fromkeys(works, float("inf"))
    for _ in range(_ATTEMPTS):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            least[name] = min(least[name], time.perf_counter() - started)
    return least


@torch.inference_mode()
def _run(arguments: argparse.Namespace) -> dict[str, object]:
    dtype, config = DTYPES[arguments.dtype], read_config(arguments.model)
    if not load_kernels():
        raise ValueError("there are no kernels to measure")
    print(f"{arguments.model}, {arguments.dtype}, {torch.get_num_threads()} threads", flush=True)
    tell("linear layers")
    linear = linear_times(config, dtype, arguments.weights, arguments.rows)
    rows = [[str(count), *(number(linear[name][count] * 1e3) for name in linear)] for count in arguments.rows]
    print(table(("rows", *linear), rows))
    tell("attention")
    attention = {tokens: attention_times(config, dtype, tokens) for tokens in arguments.prompts}
    rows = [[str(tokens), *(number(seconds * 1e3) for seconds in each.values())] for tokens, each in attention.items()]
    print(table(("tokens", *next(iter(attention.values()))), rows))
    return {"model": str(arguments.model), "dtype": arguments.dtype, "linear": linear, "attention": attention}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder; its weights are not read")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--weights", nargs="+", choices=("int8", "int4", "codebook", "fp8"), default=(), help="quantised ones as well"
    )
    parser.add_argument("--rows", type=positive, nargs="+", default=choice.ROWS, help="default: %(default)s")
    parser.add_argument("--prompts", type=positive, nargs="+", default=[128, 512, 2048], help="default: %(default)s")
    parser.add_argument("--threads", type=positive, help="of torch; default: one for each core")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    try:
        finish(_run(arguments), arguments.output)
    except (ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
