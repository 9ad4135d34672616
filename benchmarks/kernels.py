"""Measures the CPU's kernels alone: linear layers beside oneDNN, and attention over a prompt beside torch.

    python -m benchmarks.kernels runs/synthetic/opt-125m
    ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.kernels runs/synthetic/llama-360m --dtype float16 --threads 2
    python -m benchmarks.kernels runs/synthetic/llama-360m --weights int8 int4 codebook --rows 1 4 32 128 512
    python -m benchmarks.kernels runs/synthetic/llama-360m --write

Milliseconds of all layers of the model, by the number of rows, and of one layer's attention, by the prompt's tokens.
With --weights, layers with quantised weights are measured as well as dense ones. All columns are measured in turns, and
the shortest of several times counts. --write measures all kinds of weights and replaces this ISA's section of the table
by which kernels are chosen (tgi_server/engine/linear/kernels.toml).
"""

import argparse
import datetime
import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM, PretrainedConfig

from benchmarks import trials
from benchmarks.machine import read_config
from benchmarks.report import finish_run, number, table, tell
from benchmarks.workloads import positive
from tgi_server.engine.backends.attention.base import AttentionVariant, ChunkSpan, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.cpu import CpuAttention
from tgi_server.engine.config import DTYPES
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear import choice
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.onednn import OneDnnLinear

_BUDGET_SECONDS = 60.0
_ATTEMPTS = 7
# Rows and shapes with which kernels are compared bit by bit.
_COMPARED_ROWS = (1, 2, 3, 5, 8, 17, 40, 97)
_COMPARED_SHAPE = (200, 320)


def linear_times(
    config: PretrainedConfig, dtype: torch.dtype, kinds: Sequence[str], numbers_of_rows: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Returns the seconds of all layers but the head, by kernel and number of rows. kinds: of quantised weights."""
    outputs = outputs_by_depth(config)
    plain = choice.Weights.plain(dtype)
    candidates = {name: (plain, name) for name in plain.kernels}
    for kind in kinds:
        weights = choice.Weights.quantized(kind, dtype)
        candidates |= {f"{kind}: {name}": (weights, name) for name in (*weights.kernels, *weights.by_name)}
    onednn = replace(
        plain, make=lambda outputs, inputs, _: OneDnnLinear(torch.full((outputs, inputs), 0.01, dtype=dtype))
    )
    # apart: its threads keep the cores busy after a loop
    times = [{"onednn": (onednn, "onednn")}, candidates]
    return {
        name: seconds
        for each in times
        for name, seconds in trials.measure(outputs, each, numbers_of_rows, seconds=_BUDGET_SECONDS).items()
    }


def outputs_by_depth(config: PretrainedConfig) -> Counter[int]:
    """Returns the outputs of the layers, without the head, added up by their number of inputs."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings()
    outputs: Counter[int] = Counter()
    for layer in model.modules():
        if type(layer) is nn.Linear and layer is not head:
            outputs[layer.in_features] += layer.out_features
    return outputs


def best_table(weights: choice.Weights, times: Mapping[str, trials.Times]) -> KernelTable:
    """Returns the fastest table whose kernels are equal to the last bit, by the times of kernels."""
    groups: list[list[str]] = []
    for name in times:
        group = next((group for group in groups if equal_bits(weights, group[0], name)), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return min(
        (trials.choose({name: times[name] for name in group}) for group in groups), key=lambda t: _cost(t, times)
    )


def equal_bits(weights: choice.Weights, *names: str) -> bool:
    """Returns True if these kernels give the same bits for all rows, in float32: 16 bits hide small errors."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(_COMPARED_ROWS), _COMPARED_SHAPE[1], generator=generator).to(weights.dtype).float()
    first, *others = (weights.make(*_COMPARED_SHAPE, KernelTable.of(name)) for name in names)
    whole = first(x)
    return all(torch.equal(other(x[:rows]), whole[:rows]) for other in (first, *others) for rows in _COMPARED_ROWS)


def _cost(table: KernelTable, times: Mapping[str, trials.Times]) -> float:
    """Returns the mean of the logarithms of its times."""
    rows = next(iter(times.values()))
    return sum(math.log(times[table.at(count)][count]) for count in rows) / len(rows)


def kinds_of_weights() -> dict[str, list[choice.Weights]]:
    """Returns the kinds of weights that the table has, each with the dtypes of models."""
    kinds: dict[str, list[choice.Weights]] = {}
    for dtype in DTYPES.values():
        for weights in (
            choice.Weights.plain(dtype),
            *(choice.Weights.quantized(kind, dtype) for kind in ("int4", "codebook", "int6", "int8", "fp8")),
        ):
            kinds.setdefault(weights.kind, []).append(weights)
    return kinds


def write_section(config: PretrainedConfig, numbers_of_rows: Sequence[int], comment: str) -> None:
    """Measures all kinds of weights, and replaces this ISA's section of the table."""
    isa, lines = torch.ops.oatmill.isa(), [f"# {comment}"]
    for kind, each in kinds_of_weights().items():
        lines.append(f"[{isa}.{kind}]")
        for weights in each:
            tell(f"{kind}, {weights.dtype}")
            candidates = {name: (weights, name) for name in weights.kernels}
            times = trials.measure(outputs_by_depth(config), candidates, numbers_of_rows, seconds=_BUDGET_SECONDS / 10)
            lines.append(f'{str(weights.dtype).removeprefix("torch.")} = "{best_table(weights, times)}"')
        lines.append("")
    choice.TABLE.write_text(with_section(choice.TABLE.read_text(), isa, "\n".join(lines)))


def with_section(text: str, isa: str, section: str) -> str:
    """Returns a table with another section of an ISA, which comes last."""
    paragraphs = [each for each in text.strip().split("\n\n") if f"[{isa}." not in each]
    return "\n\n".join([*paragraphs, section.strip()]) + "\n"


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
        query, key, value = parts
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)

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
    if arguments.write:
        comment = f"{_cpu()}, {torch.get_num_threads()} threads, {arguments.model.name}, {datetime.date.today()}"
        write_section(config, arguments.rows, comment)
        return {"table": choice.tables()[torch.ops.oatmill.isa()]}
    tell("linear layers")
    linear = linear_times(config, dtype, arguments.weights, arguments.rows)
    rows = [[str(count), *(number(linear[name][count] * 1e3) for name in linear)] for count in arguments.rows]
    print(table(("rows", *linear), rows))
    tell("attention")
    attention = {tokens: attention_times(config, dtype, tokens) for tokens in arguments.prompts}
    rows = [[str(tokens), *(number(seconds * 1e3) for seconds in each.values())] for tokens, each in attention.items()]
    print(table(("tokens", *next(iter(attention.values()))), rows))
    return {"model": str(arguments.model), "dtype": arguments.dtype, "linear": linear, "attention": attention}


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model folder; its weights are not read")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default: %(default)s")
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=("int8", "int4", "int6", "codebook", "fp8"),
        default=(),
        help="quantised ones as well",
    )
    parser.add_argument("--rows", type=positive, nargs="+", default=trials.ROWS, help="default: %(default)s")
    parser.add_argument("--prompts", type=positive, nargs="+", default=[128, 512, 2048], help="default: %(default)s")
    parser.add_argument("--write", action="store_true", help="write this ISA's section of the table of kernels instead")
    parser.add_argument("--threads", type=positive, help="of torch; default: one for each core")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write the JSON as well")
    arguments = parser.parse_args()
    finish_run(_run, arguments, ValueError, RuntimeError)


if __name__ == "__main__":
    main()
