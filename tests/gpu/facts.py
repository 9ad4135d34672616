"""Measures the kernels on a GPU at the sizes of real models: are they right, and how far from the card's limits?

    python -m tests.gpu.facts          prints a JSON line for each fact as it comes, and appends it to facts.jsonl in
                                       the folder $OUT, or else in runs/gpu
    python -m tests.gpu.facts flash    only the parts with this in their names
    python -m tests.gpu.facts --dry    tiny sizes in Triton's interpreter, without times: does this program itself run?

A run is timed as a replayed CUDA graph, so launches are left out, and each kernel is shown to be recordable. A part
that fails says so in its line and hides no other.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

from benchmarks.synthetic import build_model  # noqa: E402
from tgi_server.engine import Engine, EngineConfig  # noqa: E402
from tgi_server.engine.backends.attention.base import AttentionVariant, ChunkSpan, ForwardMetadata, KVShape  # noqa: E402
from tgi_server.engine.backends.attention.cuda import CudaAttention  # noqa: E402
from tgi_server.engine.backends.attention.cuda_latents import tiles_of_rows  # noqa: E402
from tgi_server.engine.backends.attention.flash import FlashAttention, fault_of  # noqa: E402
from tgi_server.engine.checkpoint.quantized import QuantizedLinear, QuantizedWeight  # noqa: E402
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS  # noqa: E402
from tgi_server.engine.kernels.triton import split_kv  # noqa: E402
from tgi_server.engine.kernels.triton.latents import LatentShape, attend_latents  # noqa: E402
from tgi_server.engine.kernels.triton.sampling import choose  # noqa: E402
from tgi_server.engine.linear.gpu import quantized_layer  # noqa: E402
from tgi_server.engine.linear.kernel_table import KernelTable  # noqa: E402

DEVICE = torch.device("cpu" if DRY else "cuda")
DTYPE = torch.float32 if DRY else torch.bfloat16
BLOCK = 32
# Lengths are divided by this in a dry run.
SHORTER = 64 if DRY else 1
HEAD_DIM = 128
# Outputs and inputs of weights, and by how many rows they are multiplied.
KINDS = ("int4", "fp8", "fp8 in blocks")
WEIGHTS = ((64, 128),) if DRY else ((4096, 14336), (28672, 4096))
ROWS = (1, 16) if DRY else (1, 16, 64, 256, 1024, 4096)
STARTED = time.monotonic()


def tell(what: str, **facts: Any) -> None:
    line = json.dumps({"what": what, "at_s": round(time.monotonic() - STARTED, 1), **facts})
    print(line, flush=True)
    folder = Path(os.environ.get("OUT", "runs/gpu"))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "facts.jsonl").open("a") as file:
        print(line, file=file)


def part(job: Callable[..., None], *arguments: Any) -> None:
    """Runs one part; an error becomes a line."""
    try:
        job(*arguments)
    except Exception as error:
        tell(job.__name__, error=f"{type(error).__name__}: {str(error)[:600]}")
    if not DRY:
        torch.cuda.empty_cache()


def chosen(job: Callable[..., None]) -> bool:
    """Returns True if the command line names the part, or none."""
    names = [each for each in sys.argv[1:] if each != "--dry"]
    return not names or any(name in job.__name__ for name in names)


def seconds(run: Callable[[], object], times: int = 20) -> float:
    """Returns the seconds of one run, as a part of a CUDA graph of several; the median of five replays."""
    run()
    if DRY:
        return float("nan")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(times):
            run()
    graph.replay()
    measured = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        measured.append(begin.elapsed_time(end) / 1e3 / times)
    return sorted(measured)[2]


def card() -> None:
    tell("versions", torch=torch.__version__, cuda=torch.version.cuda, triton=triton.__version__)
    if DRY:
        return
    card = torch.cuda.get_device_properties(0)
    capability = [card.major, card.minor]
    tell("card", name=card.name, capability=capability, sms=card.multi_processor_count, gib=card.total_memory / 2**30)
    big = torch.zeros(1 << 29, dtype=torch.float32, device=DEVICE)
    tell("memory, read and written", gb_s=2 * big.nbytes / seconds(lambda: big.add_(1)) / 1e9)


def cublas() -> None:
    if DRY:
        return
    for rows in (1, 16, 64, 256, 4096):
        x, weight = (torch.randn(n, 4096, device=DEVICE, dtype=DTYPE) for n in (rows, 28672))
        _tell_product("cublas bf16", weight.nbytes, weight.shape, x, lambda x=x, weight=weight: x @ weight.t())


def decode() -> None:
    for batch, context in ((1, 1024), (1, 32768), (32, 8192), (256, 1024)):
        rows = [context // SHORTER] * (2 if DRY else batch)
        attention(f"decode 8B, batch {batch}, context {context}", 32, 8, rows)
    for context in (1024, 8192, 32768):
        attention(f"decode 70B by eight (one KV head), context {context}", 8, 1, [context // SHORTER])


def latents(variant: str = "") -> None:
    """Sequences that decode over latents: those of DeepSeek-V3, whole and by eight, and of GLM-4.7-Flash."""
    for heads, batch, context in ((16, 1, 8192), (16, 32, 8192), (128, 32, 8192), (20, 1, 32768), (20, 128, 1024)):
        lengths = [context // SHORTER] * (2 if DRY else batch)
        given, shape = metadata(lengths, 0), LatentShape.of(heads, DTYPE.itemsize, DEVICE)
        query, turned = (torch.randn(len(lengths), heads, n, device=DEVICE, dtype=DTYPE) for n in (512, 64))
        blocks = int(given.block_tables.max()) + 1
        caches = [torch.randn(blocks, BLOCK, 1, size, device=DEVICE, dtype=DTYPE) for size in (512, 64)]
        tiles = tiles_of_rows(given)
        plan = split_kv.plan_parts(tiles, heads // shape.group, shape.key_tile, 0)
        arguments = (query, turned, *caches, given.block_tables, tiles, plan, shape, 192**-0.5)
        output = attend_latents(*arguments)
        key, rotated = (cache[given.block_tables[-1].long()].flatten(0, 2)[: lengths[-1]].float() for cache in caches)
        scores = (query[-1].float() @ key.T + turned[-1].float() @ rotated.T) * 192**-0.5
        error = float((output[-1].float() - scores.softmax(-1) @ key).abs().max())
        took = seconds(lambda arguments=arguments: attend_latents(*arguments))
        size = 576 * sum(lengths) * DTYPE.itemsize
        what = f"latents, {heads} heads, batch {batch}, context {context}{variant}"
        tell(what, error=error, us=took * 1e6, gb_s=size / took / 1e9)


def prefill() -> None:
    for length, context in ((1024, 1024), (4096, 4096), (4096, 32768)):
        attention(f"prompt 8B, {length} of {context}", 32, 8, [context // SHORTER], length // SHORTER)


def flash_attention() -> None:
    """Measures prompts by flash-attn-4, checks its results beyond the ends of windows, and runs a model with it."""
    shape = KVShape((8,), HEAD_DIM)
    if DRY or not FlashAttention.supports(shape, DTYPE):
        tell("flash-attn-4 is not installed, or not for this card")
        return
    tell("flash-attn-4", fault=fault_of(FlashAttention(shape, DEVICE, DTYPE), {128, 4096}))
    for length, context in ((1024, 1024), (4096, 4096), (4096, 32768)):
        attention(f"prompt 8B by flash-attn-4, {length} of {context}", 32, 8, [context], length, FlashAttention)
    sizes = {"vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=2)
    engine = Engine(EngineConfig(Path("/nowhere"), DTYPE, DEVICE), build_model(config, DEVICE, DTYPE))
    engine.warm_up(max_batch_size=4, max_prefill_tokens=256, max_total_tokens=512)
    runner: Any = engine._runner
    tell("model with flash-attn-4", attention=type(runner.model.attention).__name__, fallbacks=engine.fallbacks)


def sampling(variant: str = "", numbers: tuple[int, ...] = (1, 2) if DRY else (1, 32, 256)) -> None:
    tokens = 3000 if DRY else 128256
    ways = {"temperature": (1.0, 0), "top_p": (0.9, 0), "top_k": (1.0, 50), "top_k and top_p": (0.9, 50)}
    for rows, (way, (top_p, top_k)) in itertools.product(numbers, ways.items()):
        scores = torch.randn(rows, tokens, device=DEVICE) * 3
        settings = torch.tensor([[0.7, top_p, 0.0]] * rows, dtype=torch.float64, device=DEVICE)
        ks, seeds = (torch.full((rows,), n, dtype=torch.int64, device=DEVICE) for n in (top_k, 7))
        took = seconds(lambda scores=scores, args=(settings, ks, seeds, seeds): choose(scores, *args))
        tell(f"sampling, {way}{variant}", rows=rows, us=took * 1e6)


def quantized() -> None:
    kernels = ("triton", "humming"), ("triton", "scaled_mm"), ("triton", "scaled_mm")
    for kind, kernel in [(kind, each) for kind, own in zip(KINDS, kernels, strict=True) for each in own]:
        for outputs, inputs in WEIGHTS:
            try:
                product(kind, kernel, outputs, inputs)
            except Exception as error:
                tell(f"{kind} by {kernel}", error=f"{type(error).__name__}: {str(error)[:600]}")


def grouped_mm() -> None:
    """Mixtures' product: 32 experts, two rows each."""
    if DRY:
        return
    x = torch.randn(64, 2880, device=DEVICE, dtype=DTYPE)
    weight = torch.randn(32, 2880, 5760, device=DEVICE, dtype=DTYPE)
    ends = torch.arange(2, 66, 2, dtype=torch.int32, device=DEVICE)
    took = seconds(lambda: torch.nn.functional.grouped_mm(x, weight, offs=ends))
    tell("grouped_mm in a graph", us=took * 1e6, gb_s=weight.nbytes / took / 1e9)


def product(
    kind: str, kernel: str, outputs: int, inputs: int, numbers: tuple[int, ...] = ROWS, variant: str = ""
) -> None:
    weight = _weight(kind, outputs, inputs)
    made, dense = quantized_layer(weight, None, KernelTable.of(kernel), DTYPE), weight.dense(DTYPE)
    for rows in numbers:
        x = torch.randn(rows, inputs, device=DEVICE, dtype=DTYPE)
        wanted = (x @ dense.t()).float()
        error = float((made(x).float() - wanted).norm() / wanted.norm())
        _tell_product(
            f"{kind} by {kernel}{variant}", weight.codes.nbytes, dense.shape, x, lambda x=x: made(x), error=error
        )


@cache
def _weight(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    layer = QuantizedLinear(torch.nn.Linear(inputs, outputs, bias=False, device="meta"))
    weight = ROUNDINGS[kind.partition(" ")[0]][1](torch.randn(outputs, inputs) * 0.02)
    if kind == "fp8 in blocks":
        groups = torch.arange(inputs, device=weight.groups.device) // 128
        weight = replace(weight, stored_scales=weight.scales.repeat(1, inputs // 128), groups=groups)
    layer.fill(weight)
    return layer.to(DEVICE).quantized


def _tell_product(what: str, size: int, shape: torch.Size, x: Tensor, run: Callable[[], Tensor], **more: float) -> None:
    """size: bytes of the weight, whose shape is [outputs, inputs]."""
    took, products = seconds(run), 2 * len(x) * shape.numel()
    speed = {"us": took * 1e6, "gb_s": size / took / 1e9, "tflop_s": products / took / 1e12}
    tell(f"{what}, {shape[0]}x{shape[1]}", rows=len(x), **speed, **more)


def attention(
    what: str, heads: int, kv_heads: int, lengths: list[int], chunk: int = 0, kind: type[CudaAttention] = CudaAttention
) -> None:
    """Attends over sequences of these lengths in keys: all decode, or `chunk` tokens of the one's prompt."""
    backend = kind(KVShape((kv_heads,), HEAD_DIM), DEVICE, DTYPE)
    backend.allocate(sum(-(-length // BLOCK) for length in lengths) + 1)
    for each in (*backend._keys, *backend._values):
        each.normal_()
    given, scaling = metadata(lengths, chunk), HEAD_DIM**-0.5
    query = torch.randn(chunk or len(lengths), heads, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    variant = AttentionVariant(scaling)
    output = backend.attend(0, query, given, variant)
    count, row = min(chunk, 64) or 1, 0 if chunk else len(lengths) - 1
    wanted = _expected(backend, query[-count:], given, row, scaling)
    error = float((output[-count:].float() - wanted).abs().max())
    took = seconds(lambda: backend.attend(0, query, given, variant))
    keys = chunk * lengths[0] - chunk * chunk / 2 if chunk else sum(lengths)
    speed = {
        "gb_s": 4 * kv_heads * HEAD_DIM * sum(lengths) / took / 1e9,
        "tflop_s": 4e-12 * heads * HEAD_DIM * keys / took,
    }
    tell(what, error=error, us=took * 1e6, **speed)


def metadata(lengths: list[int], chunk: int) -> ForwardMetadata:
    """Returns the metadata of a pass; the blocks of all rows are different ones, shuffled."""
    blocks = [-(-length // BLOCK) for length in lengths]
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    order = (torch.randperm(sum(blocks)) + 1).int()
    for row, mine in enumerate(order.split(blocks)):
        table[row, : len(mine)] = mine
    queries = [chunk] if chunk else [1] * len(lengths)
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    slots = torch.zeros(sum(queries), dtype=torch.int64, device=DEVICE)
    spans = [ChunkSpan(0, chunk, lengths[0])] if chunk else []
    kv_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    decoding = 0 if chunk else len(lengths)
    return ForwardMetadata(slots, table.to(DEVICE), kv_lengths, starts.to(DEVICE), decoding, spans, max(lengths))


def _expected(backend: CudaAttention, query: Tensor, given: ForwardMetadata, row: int, scaling: float) -> Tensor:
    """Returns what the last queries of a row attend, [queries, heads, head_dim], in float32."""
    table, length, count = given.block_tables[row].long(), int(given.kv_lengths[row]), len(query)
    caches = backend._keys[0], backend._values[0]
    group = query.shape[1] // backend.shape.heads[0]
    keys, values = (
        cache[table].flatten(0, 1)[:length].float().transpose(0, 1).repeat_interleave(group, 0) for cache in caches
    )
    mask = torch.ones(count, length, dtype=torch.bool, device=DEVICE).tril(length - count)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.float().transpose(0, 1), keys, values, attn_mask=mask, scale=scaling
    )
    return attended.transpose(0, 1)


def main() -> None:
    if not DRY and not torch.cuda.is_available():
        sys.exit("no GPU that this torch can use: is the driver older than its CUDA?")
    if DRY:
        split_kv.multiprocessors = lambda device: 4  # type: ignore[assignment]
    with torch.inference_mode():
        parts = (card, cublas, decode, latents, prefill, flash_attention, sampling, quantized, grouped_mm)
        for each in (*parts[:1], *filter(chosen, parts[1:])):
            part(each)


if __name__ == "__main__":
    main()
