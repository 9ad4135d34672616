"""Measures each kernel with other launch shapes than it has, one beside the other: which are the best on this card?

python -m tests.gpu.variants        prints a JSON line for each, as `facts.py` does
python -m tests.gpu.variants fp8    only the parts with this in their names
python -m tests.gpu.variants --dry  tiny sizes in Triton's interpreter
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from tests.gpu import facts  # first: in a dry run it makes Triton an interpreter

# isort: split
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tgi_server.engine.backends.attention import cuda as attention_of_gpus
from tgi_server.engine.backends.attention.base import AttentionVariant, KVShape
from tgi_server.engine.backends.attention.cuda import CudaAttention
from tgi_server.engine.kernels.triton import (
    argmax,
    dependent_launch,
    few_rows,
    norm_and_gate,
    paged_attention,
    sampling,
    split_kv,
    w4a16_gemm,
)
from tgi_server.engine.kernels.triton.few_rows import FewRowsTile, InputNorm
from tgi_server.engine.kernels.triton.latents import LatentShape
from tgi_server.engine.kernels.triton.paged_attention import LaunchShape
from tgi_server.engine.kernels.triton.w4a16_gemm import ProductTile
from tgi_server.engine.linear.blas import BlasLinear
from tgi_server.engine.linear.few_rows import FewRowsLinear
from tgi_server.engine.linear.grouped_experts import GroupedExperts

# Rows, keys together, warps, stages.
PROMPT_SHAPES = [
    (128, 64, 8, 5),
    (128, 64, 8, 3),
    (128, 64, 8, 7),
    (128, 128, 8, 5),
    (128, 128, 8, 3),
    (128, 64, 4, 5),
    (64, 64, 4, 5),
    (64, 128, 4, 5),
    (256, 64, 8, 5),
]
DECODE_SHAPES = [(16, 64, 4, 5), (16, 64, 4, 3), (16, 64, 4, 7), (16, 32, 4, 5), (16, 128, 4, 5), (16, 128, 8, 5)]
# Of latents: rows of products, keys together, warps, stages.
LATENT_SHAPES = [
    (64, 32, 8, 2),
    (64, 32, 8, 3),
    (64, 16, 8, 3),
    (64, 64, 8, 2),
    (32, 32, 8, 3),
    (16, 32, 4, 5),
    (16, 32, 8, 5),
    (16, 64, 8, 3),
    (16, 16, 4, 5),
]
# Programs of a multiprocessor, fewest key tiles of a part.
SPLITS = [(1, 4), (2, 2), (2, 8), (4, 4), (4, 2)]
# Tokens that the sampler looks at together, warps.
SAMPLERS = [(4096, 16), (2048, 8), (8192, 32), (4096, 32), (4096, 8), (2048, 16)]
# Rows of a product, outputs, warps, stages, programs of a multiprocessor.
PRODUCTS = [
    (16, 32, 2, 4, 8),
    (16, 32, 2, 4, 4),
    (16, 32, 2, 6, 8),
    (16, 64, 2, 4, 8),
    (16, 64, 4, 4, 8),
    (16, 16, 1, 4, 16),
    (64, 64, 4, 4, 8),
    (64, 64, 4, 4, 2),
    (64, 32, 4, 4, 4),
    (64, 128, 8, 4, 4),
]
# Outputs, inputs at once, warps, stages, programs of a multiprocessor.
FEW_ROWS = [
    (64, 128, 4, 4, 8),
    (64, 128, 4, 3, 8),
    (64, 128, 4, 4, 4),
    (64, 128, 4, 4, 16),
    (64, 64, 4, 6, 8),
    (32, 128, 4, 4, 8),
    (128, 64, 4, 4, 8),
    (128, 128, 8, 3, 4),
]
# The weights of a layer of 8B, [outputs, inputs]: qkv, output, gate and up, down.
LAYER = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]


def main() -> None:
    # The most valuable first: a run may be cut.
    parts: list[tuple[Callable[..., None], list[Any]]] = [
        (_few_rows, [(), *FEW_ROWS]),
        (_one_kernel, [("three kernels",), ("attend_in_one",)]),
        (_dependent, [("off",), ("pdl",)]),
        (_argmax, [("torch",), ("argmax",)]),
        (_experts, [("torch",), ("experts",)]),
        (_latents, LATENT_SHAPES),
        (_dense, [(16,), (32,), (64,), (128,), (256,)]),
        (_product, PRODUCTS),
        (_sampler, SAMPLERS),
        (_decode, DECODE_SHAPES),
        (_splits, SPLITS),
        (_prompts, PROMPT_SHAPES),
    ]
    with torch.inference_mode():
        for job, variants in [each for each in parts if facts.chosen(each[0])]:
            for variant in variants:
                facts.part(job, *variant)


def _shaped(shape: tuple[int, ...]) -> Any:
    rows, key_tile, warps, stages = shape
    made = LaunchShape(rows, facts.HEAD_DIM, key_tile, warps, stages)
    return mock.patch.object(LaunchShape, "of", classmethod(lambda *_: made))


def _prompts(*shape: int) -> None:
    if facts.DRY:
        shape = (32, 16, 8, 1)
    with _shaped(shape), mock.patch.object(paged_attention, "tokens_of_a_tile", lambda group, *_: shape[0] // group):
        for length, context in ((1024, 1024), (4096, 4096), (1024, 32768)):
            facts.attention(
                f"prompt 8B, {length} of {context}, rows, keys, warps, stages {shape}",
                32,
                8,
                [context // facts.SHORTER],
                length // facts.SHORTER,
            )


def _decode(*shape: int) -> None:
    with _shaped(shape if not facts.DRY else (16, 16, 8, 1)):
        _decodes(f"rows, keys, warps, stages {shape}")


def _latents(*shape: int) -> None:
    rows, *rest = (16, 16, 8, 1) if facts.DRY else shape

    def made(_: object, heads: int, *__: object) -> LatentShape:
        return LatentShape(max(count for count in range(1, rows + 1) if heads % count == 0), rows, *rest)

    with mock.patch.object(LatentShape, "of", classmethod(made)):
        facts.latents(f", rows, keys, warps, stages {shape}")


def _few_rows(*shape: int) -> None:
    """The products of a layer with what stands around them: by cuBLAS if there is no shape, else by the kernel."""
    kind: Any = FewRowsLinear if shape else BlasLinear
    layers: list[Any] = []
    for outputs, inputs in LAYER:
        dense = torch.randn(outputs // facts.SHORTER, inputs // facts.SHORTER, device=facts.DEVICE, dtype=facts.DTYPE)
        layers.append(kind(dense * 0.02))
    qkv, output, up, down = layers
    weight = torch.ones(qkv.in_features, device=facts.DEVICE, dtype=facts.DTYPE)
    norm = InputNorm(weight, 1e-5)

    def layer(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if shape:
            attended = qkv.fused(x, norm=norm)[:, : output.in_features]
            x = output.fused(attended, residual)
            return down.fused(up.fused(x, norm=norm, activation="silu", gated=True), x)
        attended = qkv(norm_and_gate.rms_norm(x, weight, 1e-5))[:, : output.in_features]
        x = output.add_to(residual, attended)
        widened = norm_and_gate.activate(up(norm_and_gate.rms_norm(x, weight, 1e-5)), "silu", gated=True)
        return down.add_to(x, widened)

    size = sum(each._weight.nbytes for each in layers)
    for rows in (1,) if facts.DRY else (1, 4, 16):
        x, residual = torch.randn(2, rows, qkv.in_features, device=facts.DEVICE, dtype=facts.DTYPE)
        with _few_rows_of(*shape):
            took = facts.seconds(lambda x=x, residual=residual: layer(x, residual))
            facts.tell(f"few rows, {shape or 'cuBLAS'}", rows=rows, us=took * 1e6, gb_s=size / took / 1e9)


def _one_kernel(name: str) -> None:
    """Turns, writes and attends for rows that decode, by three kernels and by one."""
    for batch, context in ((1, 1024), (1, 32768), (32, 8192), (256, 1024)):
        lengths = [context // facts.SHORTER] * (2 if facts.DRY else batch)
        backend = CudaAttention(KVShape((8,), facts.HEAD_DIM), facts.DEVICE, facts.DTYPE)
        backend.allocate(sum(-(-length // facts.BLOCK) for length in lengths) + 1)
        given = facts.metadata(lengths, 0)
        joined = torch.randn(len(lengths), 48, facts.HEAD_DIM, device=facts.DEVICE, dtype=facts.DTYPE)
        query, key, value = joined.split((32, 8, 8), 1)
        turns = torch.rand(2, 1, len(lengths), facts.HEAD_DIM, device=facts.DEVICE, dtype=facts.DTYPE)
        variant = AttentionVariant(facts.HEAD_DIM**-0.5)
        arguments = (0, query, key, value, (turns[0], turns[1]), given, variant)
        with mock.patch.object(attention_of_gpus, "variants", return_value={name}):
            took = facts.seconds(lambda backend=backend, given=arguments: backend.write_and_attend(*given))
        size = 4 * 8 * facts.HEAD_DIM * sum(lengths)
        facts.tell(f"decode 8B, batch {batch}, context {context}, {name}", us=took * 1e6, gb_s=size / took / 1e9)


def _dependent(name: str) -> None:
    """A chain of norms and gates, each of which needs what the one before has written; as the chains of layers do."""
    x, weight = (torch.ones(*shape, device=facts.DEVICE, dtype=facts.DTYPE) for shape in ((1, 8192), (4096,)))

    def chain() -> torch.Tensor:
        made = x
        for _ in range(2 if facts.DRY else 20):
            made = norm_and_gate.rms_norm(norm_and_gate.activate(made, "silu", gated=True), weight, 1e-5)
            made = made.repeat(1, 2)
        return made

    with mock.patch.object(dependent_launch, "variants", return_value={name}):
        dependent_launch.launch_options.cache_clear()
        took = facts.seconds(chain, times=2)
    dependent_launch.launch_options.cache_clear()
    facts.tell(f"20 gates, norms and copies in a chain, programmatic launch {name}", us=took * 1e6)


def _argmax(name: str) -> None:
    for rows in (1, 32, 256):
        scores = torch.randn(rows, 128256 // facts.SHORTER, device=facts.DEVICE, dtype=facts.DTYPE)
        found = argmax.argmax(scores) if name == "argmax" else scores.max(-1).indices
        error = int((found != scores.float().argmax(-1)).sum())
        took = facts.seconds(lambda scores=scores: argmax.argmax(scores) if name == "argmax" else scores.max(-1))
        facts.tell(f"argmax by {name}", rows=rows, us=took * 1e6, others=error)


def _experts(name: str) -> None:
    """All experts of a layer by torch's `grouped_mm`, as `transformers` calls it, and by the engine's kernels."""
    for experts, of_token, hidden, widened in ((8, 2, 4096, 14336), (128, 8, 2048, 768)):
        sizes = {"hidden_size": hidden // facts.SHORTER, "intermediate_size": widened // facts.SHORTER}
        config = MixtralConfig(num_local_experts=experts, **sizes)
        config._experts_implementation = "grouped_mm"
        with torch.device(facts.DEVICE):
            module = MixtralExperts(config).to(facts.DTYPE).requires_grad_(False)
        for weight in module.parameters():
            weight.normal_(std=0.02)
        compute = GroupedExperts(module) if name == "experts" else module
        for tokens in (1,) if facts.DRY else (1, 32, 256, 4096):
            x = torch.randn(tokens, sizes["hidden_size"], device=facts.DEVICE, dtype=facts.DTYPE)
            chosen = torch.rand(tokens, experts, device=facts.DEVICE).topk(of_token).indices
            shares = torch.full(chosen.shape, 1 / of_token, device=facts.DEVICE, dtype=facts.DTYPE)
            took = facts.seconds(lambda given=(x, chosen, shares), compute=compute: compute(*given))
            facts.tell(f"{of_token} of {experts} experts by {name}", rows=tokens, us=took * 1e6)


@contextlib.contextmanager
def _few_rows_of(*shape: int) -> Iterator[None]:
    if not shape:
        yield
        return
    outputs, inputs, warps, stages, programs = shape
    with (
        mock.patch.object(FewRowsTile, "of", classmethod(lambda *_: FewRowsTile(16, outputs, inputs, warps, stages))),
        mock.patch.object(few_rows, "_PROGRAMS_PER_PROCESSOR", programs),
    ):
        yield


def _splits(programs: int, fewest: int) -> None:
    with (
        mock.patch.object(split_kv, "PROGRAMS_PER_PROCESSOR", programs),
        mock.patch.object(split_kv, "_FEWEST_KEY_TILES", fewest),
    ):
        _decodes(f"programs of a multiprocessor {programs}, fewest key tiles {fewest}")


def _decodes(what: str) -> None:
    for batch, context in ((1, 1024), (1, 32768), (32, 8192), (256, 1024)):
        rows = [context // facts.SHORTER] * (2 if facts.DRY else batch)
        facts.attention(f"decode 8B, batch {batch}, context {context}, {what}", 32, 8, rows)
    facts.attention(f"decode 70B by eight, context 8192, {what}", 8, 1, [8192 // facts.SHORTER])


def _sampler(at_once: int, warps: int) -> None:
    shape = at_once, warps
    with mock.patch.object(sampling, "SHAPE_OF_FEW", shape), mock.patch.object(sampling, "SHAPE_OF_MANY", shape):
        facts.sampling(f", at once {at_once}, warps {warps}", (1,) if facts.DRY else (1, 32, 256))


def _product(rows: int, outputs: int, warps: int, stages: int, programs: int) -> None:
    tile = ProductTile(rows, outputs, warps, stages)
    with (
        mock.patch.object(ProductTile, "of", classmethod(lambda *_: tile)),
        mock.patch.object(w4a16_gemm, "_PROGRAMS_PER_PROCESSOR", programs),
    ):
        what = f", outputs {outputs}, warps {warps}, stages {stages}, programs of a multiprocessor {programs}"
        for sizes in facts.WEIGHTS:
            facts.product("int4", "triton", *sizes, (1, rows), what)


def _dense(rows: int) -> None:
    """The same rows by the kernel and by cuBLAS, once the weight is dequantized."""
    for first, name in ((rows + 1, "kernel"), (rows, "dequantized first")):
        with mock.patch.object(w4a16_gemm, "DENSE_ROWS", first):
            for sizes in facts.WEIGHTS:
                facts.product("int4", "triton", *sizes, (rows,), f", {name}")


if __name__ == "__main__":
    main()
