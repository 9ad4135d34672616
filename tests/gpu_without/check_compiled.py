"""Every kernel compiled for each kind of device, ahead of time: what it needs fits, and nothing is spilled."""

import re
import subprocess
from collections.abc import Collection, Mapping
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tgi_server.engine.kernels.triton import (
    argmax,
    decode_attention,
    few_rows,
    grouped_gemm,
    latents,
    lora,
    norm_and_gate,
    paged_attention,
    rope_and_cache,
    rounding,
    routing,
    row_places,
    sampling,
    split_kv,
    w4a16_gemm,
)
from tgi_server.engine.kernels.triton.grouped_gemm import GroupTile
from tgi_server.engine.kernels.triton.paged_attention import LaunchShape, tokens_of_a_tile
from tgi_server.engine.models.spec import Activation

# Bytes of shared memory that one program may have, by compute capability (technical specifications of the CUDA C++
# Programming Guide).
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# GPUs that take no kernel with matrix products, only the one that samples.
OLDER = {75: 64 << 10}
# Bytes of a thread's stack: a few registers that are stored once cost nothing.
MOST_STACK = 64
# Of prompts' attention, whose sums and scores take all registers there are: Triton 3.7 spills some for heads of 64
# elements on 12.0, and for caches in e4m3.
MOST_STACK_OF_PROMPTS = 192
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INTS = "*i32"


def compiled(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    capability: int,
    warps: int,
    stages: int = 3,
    sizes: Collection[str] = (),
) -> Any:
    """Compiles as the launcher does for addresses, strides and `sizes` that are multiples of 16."""
    constants = {"pdl": False} | dict(constants)
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    aligned = [
        i
        for i, (name, kind) in enumerate(signature.items())
        if (kind.startswith("*") or name.endswith("_stride") or name in sizes)
        and not kernel.params[i].do_not_specialize
    ]
    source = ASTSource(
        kernel,
        signature,
        constexprs={name: value for name, value in constants.items() if name in kernel.arg_names},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def check(program: Any, capability: int, tmp_path: Path, most_stack: int = MOST_STACK) -> None:
    assert program.metadata.shared <= (SHARED_BYTES | OLDER)[capability]
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(program.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    (local,) = re.findall(r"STACK:(\d+)", usage)
    assert int(local) <= most_stack, f"registers are spilled: {usage}"


def attention(
    capability: int,
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    *,
    prompts: bool,
    mantissa: int = 0,
    keys_too: bool = True,
    programs: float = 8.0,
    in_one: bool = False,
    **kinds: bool,
) -> list[Any]:
    """mantissa: of the cache's values, if they are of 8 bits. keys_too: so are keys. programs: of a multiprocessor; few
    have less rows. in_one: the kernel that also turns, writes and joins.
    """
    itemsize = dtype.itemsize
    tokens = tokens_of_a_tile(group, head_dim, itemsize, programs) if prompts else 1
    shape = LaunchShape.of(group, head_dim, itemsize, tokens, SHARED_BYTES[capability])
    kinds = dict.fromkeys(("windowed", "capped", "alibi", "rounded_alibi", "sunk"), False) | kinds
    data = f"*{NAMES[dtype]}"
    pointers = dict.fromkeys(("query", "output"), data) | {"parts": "*fp32", "weights": "*fp32"}
    pointers |= {"keys": "*u8" if mantissa and keys_too else data, "values": "*u8" if mantissa else data}
    plan = ("tile_of", "starts", "places", "joined")
    tables = ("tables", "firsts", "counts", "kv_lengths", "sequences", *plan)
    numbers = dict.fromkeys(("tiles", "query_stride", "head_stride", "table_stride", "window", "most_joined"), "i32")
    factors = dict.fromkeys(("alibi_scaling", "softcap", "score_scaling", "value_scale"), "fp32")
    types = pointers | dict.fromkeys(tables, INTS) | numbers | factors
    types["slopes"] = "*fp32" if kinds["alibi"] else data
    types["sinks"] = "*fp32" if kinds["sunk"] else data
    sizes = {"kv_heads": 8, "group": group, "head_dim": head_dim, "rows": shape.rows, "width": shape.width}
    constants = sizes | kinds | {"block_size": 32, "key_tile": shape.key_tile, "mantissa": mantissa, "apart": prompts}
    together, at_once = split_kv.joined_at_once(shape.rows, shape.width)
    joined = sizes | {"together": together, "most_parts": split_kv.MOST_PARTS, "at_once": at_once}
    if in_one:
        return [_attention_in_one(capability, data, shape, group, types, constants)]
    return [
        compiled(paged_attention._attend_part, types, constants, capability, shape.warps, shape.stages),
        compiled(split_kv._join_parts, types, joined, capability, 4),
    ]


def _attention_in_one(
    capability: int, data: str, shape: LaunchShape, group: int, types: dict[str, str], constants: dict[str, Any]
) -> Any:
    strides = ("key_stride", "key_head_stride", "value_stride", "value_head_stride")
    types |= dict.fromkeys(("key", "value", "cosine", "sine"), data) | dict.fromkeys((*strides, "rows_of_pass"), "i32")
    types |= {"slots": "*i64", "arrived": INTS} | dict.fromkeys(("key_kept_scale", "value_kept_scale"), "fp32")
    together = min(shape.rows, triton.next_power_of_2(group))
    constants |= {"rotated": constants["head_dim"], "together": together, "most_parts": split_kv.MOST_PARTS}
    constants |= {"at_once": split_kv.parts_at_once(together, shape.width)}
    return compiled(decode_attention._attend_in_one, types, constants, capability, shape.warps, shape.stages)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "mantissa", "kinds"),
    [
        (torch.bfloat16, 128, 0, {}),
        (torch.bfloat16, 64, 3, {}),
        (torch.bfloat16, 256, 0, {"windowed": True, "capped": True}),
        (torch.float16, 128, 2, {"windowed": True, "sunk": True}),
        (torch.float32, 128, 0, {"alibi": True}),
    ],
    ids=["bfloat16", "e4m3", "soft cap", "sinks", "float32"],
)
def test_attention_in_one_kernel_fits(
    capability: int, group: int, dtype: torch.dtype, head_dim: int, mantissa: int, kinds: dict[str, bool],
    tmp_path: Path,
) -> None:  # fmt: skip
    (program,) = attention(
        capability, dtype, head_dim, group, prompts=False, mantissa=mantissa, in_one=True, **kinds
    )  # fmt: skip
    check(program, capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(("prompts", "programs"), [(False, 8), (True, 8), (True, 1)], ids=["decode", "prompts", "few"])
@pytest.mark.parametrize(("dtype", "head_dim"), list(product([torch.bfloat16, torch.float32], [64, 128, 256])))
def test_attention_fits(
    capability: int, prompts: bool, programs: float, dtype: torch.dtype, head_dim: int, tmp_path: Path
) -> None:
    for program in attention(capability, dtype, head_dim, 4, prompts=prompts, programs=programs):
        check(program, capability, tmp_path, MOST_STACK_OF_PROMPTS if prompts else MOST_STACK)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("prompts", [False, True], ids=["decode", "prompts"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.float16, 256), (torch.float32, 128)]
)
@pytest.mark.parametrize("mantissa", [3, 2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("keys_too", [True, False], ids=["keys too", "values alone"])
def test_attention_over_8_bits_fits(
    capability: int, prompts: bool, dtype: torch.dtype, head_dim: int, mantissa: int, keys_too: bool, tmp_path: Path
) -> None:
    for program in attention(capability, dtype, head_dim, 4, prompts=prompts, mantissa=mantissa, keys_too=keys_too):
        check(program, capability, tmp_path, MOST_STACK_OF_PROMPTS if prompts else MOST_STACK)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("prompts", [False, True], ids=["decode", "prompts"])
@pytest.mark.parametrize(
    "kinds",
    [
        {"windowed": True},
        {"windowed": True, "capped": True},
        {"alibi": True},
        {"alibi": True, "rounded_alibi": True},
        {"windowed": True, "sunk": True},
    ],
    ids=["window", "soft cap", "alibi", "rounded alibi", "sinks"],
)
def test_every_variant_of_attention_fits(
    capability: int, prompts: bool, kinds: dict[str, bool], tmp_path: Path
) -> None:
    head_dim = 256 if "capped" in kinds else 128
    for program in attention(capability, torch.bfloat16, head_dim, 2, prompts=prompts, **kinds):
        check(program, capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [16, 128])
def test_attention_over_latents_fits(
    capability: int, dtype: torch.dtype, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latents, "shared_memory", lambda device: SHARED_BYTES[capability])
    data, numbers = f"*{NAMES[dtype]}", ("tiles", "table_stride")
    planned = ("tables", "firsts", "counts", "kv_lengths", "sequences", "tile_of", "starts", "places")
    types = dict.fromkeys(("query", "turned", "latents", "beside", "output"), data) | dict.fromkeys(planned, INTS)
    types |= {"parts": "*fp32", "weights": "*fp32", "score_scaling": "fp32", "cosine": data, "sine": data}
    types |= dict.fromkeys((*numbers, "query_token", "query_head", "turned_token", "turned_head"), "i32")
    shape = latents.LatentShape.of(heads, dtype.itemsize, torch.device("cpu"))
    assert (shape.rows == 64) == (heads == 128 and dtype.itemsize == 2 and capability in (80, 90, 100))
    sizes = {"heads": heads, "group": shape.group, "rank": 512, "size": 64, "stride": 64, "rows": shape.rows}
    sizes |= {"width": 512, "size_width": 64, "block_size": 32, "key_tile": shape.key_tile}
    strides = ("query_token", "query_head", "turned_token", "turned_head")
    sizes |= {"turns": True, "interleaved": heads == 128}
    program = compiled(latents._attend_latents, types, sizes, capability, shape.warps, shape.stages, strides)
    check(program, capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_cached_of_latents_fits(capability: int, dtype: torch.dtype, tmp_path: Path) -> None:
    data = ("joined", "query_weight", "key_weight", "cosine", "sine", "latents", "beside", "queries")
    types = (
        dict.fromkeys(data, f"*{NAMES[dtype]}") | {"slots": "*i64"} | dict.fromkeys(("query_eps", "key_eps"), "fp32")
    )
    sizes = {"rank": 512, "rank_width": 512, "rotated": 64, "rotated_width": 64, "stride": 64}
    for queries, interleaved, turns in ((1536, True, True), (768, False, True), (0, True, False)):
        width = triton.next_power_of_2(max(1, queries))
        constants = sizes | {"size": queries or 3072, "size_width": width, "turns": turns, "interleaved": interleaved}
        constants |= {} if queries else {"query_weight": None}
        warps = norm_and_gate.warps_of(max(512, width))
        check(compiled(latents._write_latents, types, constants, capability, warps), capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_one_key_head_of_71_queries_fits(capability: int, tmp_path: Path) -> None:
    for prompts in (False, True):
        for program in attention(capability, torch.bfloat16, 64, 71, prompts=prompts):
            check(program, capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_the_plan_and_the_writing_fit(capability: int, tmp_path: Path) -> None:
    pointers = dict.fromkeys(("counts", "kv_lengths", "tile_of", "starts", "places", "joined"), INTS)
    types = pointers | dict.fromkeys(("tiles", "target", "window", "most_joined"), "i32")
    constants = {"key_tile": 64, "windowed": True, "at_once": split_kv._PLANNED_AT_ONCE}
    constants |= {"most_parts": split_kv.MOST_PARTS, "fewest_key_tiles": split_kv._FEWEST_KEY_TILES}
    check(compiled(split_kv._plan, types, constants, capability, 8), capability, tmp_path)
    types |= {"positions": "*i64", "slots": "*i64", "tables": INTS, "rows": "i32", "table_stride": "i32"}
    constants = {"block_size": 32, "at_once": row_places._AT_ONCE}
    check(compiled(row_places._row_places, types, constants, capability, 4), capability, tmp_path)
    data = ("query", "turned", "key", "value", "cosine", "sine")
    strides = [f"{name}_{part}" for name in ("query", "key", "value") for part in ("token", "head")]
    types = dict.fromkeys(data, "*bf16") | {"slots": "*i64"} | dict.fromkeys(strides, "i32")
    types |= {"key_scale": "fp32", "value_scale": "fp32"}
    types |= {"positions": "*i64", "frequencies": "*fp32", "scaling": "fp32", "half": "i32"}
    check(compiled(rope_and_cache._turns, types, {"width": 64}, capability, 1), capability, tmp_path)
    types |= {"x": "*bf16", "output": "*bf16"} | dict.fromkeys(("x_token", "x_head", "heads"), "i32")
    sizes = {"size": 64, "width": 64, "rotated": 64, "together": 4, "interleaved": True}
    check(compiled(rope_and_cache._turn, types, sizes, capability, 1), capability, tmp_path)
    for rotated, mantissa, together in product((0, 64, 128), (0, 2, 3), (1, 4)):
        queries = 32 if rotated else 0
        sizes = {"queries": queries, "kv_heads": 8, "head_dim": 128, "width": 128}
        constants = sizes | {"rotated": rotated, "mantissa": mantissa, "together": together}
        types |= dict.fromkeys(("keys", "values"), "*u8" if mantissa else "*bf16")
        check(compiled(rope_and_cache._turn_and_write, types, constants, capability, 1), capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_norms_and_activations_fit(capability: int, tmp_path: Path) -> None:
    types = dict.fromkeys(("x", "weight", "bias", "residual", "output"), "*bf16") | {"size": "i32"}
    types |= dict.fromkeys(("eps", "factor"), "fp32") | dict.fromkeys(("x_row", "x_head"), "i32")
    for size, centred in product((768, 4096, 8192), (False, True)):
        constants = {"size": size, "width": triton.next_power_of_2(size), "centred": centred, "heads": 1}
        constants |= {} if size == 4096 else {"residual": None}
        for weight in ("*bf16",) if centred else ("*bf16", "*fp32"):
            own, warps = types | {"weight": weight}, norm_and_gate.warps_of(size)
            program = compiled(norm_and_gate._norm, own, constants, capability, warps, sizes=("x_row", "x_head"))
            check(program, capability, tmp_path)
    for activation in get_args(Activation):
        constants = {"at_once": 1024, "activation": activation, "gated": activation != "relu"}
        check(compiled(norm_and_gate._activate, types, constants, capability, 4), capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "tf32"), (torch.float32, "ieee")])
def test_the_products_of_adapters_fit(capability: int, dtype: torch.dtype, precision: str, tmp_path: Path) -> None:
    data = dict.fromkeys(("x", "y", "residual", "sums"), f"*{NAMES[dtype]}")
    tables = dict.fromkeys(("a_of", "b_of", "dora_scale_of", "bias_delta_of", "order"), "*i64")
    numbers = dict.fromkeys(("count", "inputs", "outputs", "most"), "i32")
    types = data | tables | numbers | {"numbers": INTS, "ranks_of": INTS}
    for together in (16, 32):
        sizes = {"together": together, "ranks_at_once": lora._RANKS_AT_ONCE, "precision": precision}
        narrow = sizes | {"inputs_at_once": lora._INPUTS_AT_ONCE}
        widen = sizes | {"outputs_at_once": lora._OUTPUTS_AT_ONCE, "added": True}
        check(compiled(lora._shrink, types, narrow, capability, 4), capability, tmp_path)
        check(compiled(lora._expand, types, widen, capability, 4), capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("kind", ["int4", "codebook", "int8", "fp8"])
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 1), (torch.bfloat16, 64), (torch.float32, 1)])
def test_products_with_codes_fit(capability: int, kind: str, dtype: torch.dtype, rows: int, tmp_path: Path) -> None:
    """In blocks of both sizes, with all that there may be, and with as little as most layers have."""
    shape = w4a16_gemm.ProductTile.of(rows, dtype.itemsize)
    types = dict.fromkeys(("x", "residual", "y", "weight"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("scales", "zeros"), "*fp16")
    types |= dict.fromkeys(
        ("rows", "outputs", "inputs", "blocks", "share", "x_stride", "places", "first", "count"), "i32"
    )
    types |= {"codebook": "*fp32", "bias": "*fp32", "groups": INTS}
    types["order"] = "*i64"
    bits, sizes = w4a16_gemm.bits_of(kind), ("inputs", "outputs", "places", "count")
    for block, absent in ((128 if bits == 4 else 64, ["zeros", "order", "bias", "residual"]), (64, []), (32, [])):
        constants: dict[str, Any] = dict.fromkeys([*absent, *(() if kind == "codebook" else ["codebook"])])
        constants |= {"kind": kind, "bits": bits, "block": block, "words": w4a16_gemm.WORDS}
        types["codes"] = {8: "*u8", 16: "*i16", 32: "*i32"}[bits * block // w4a16_gemm.WORDS]
        expanded = constants | {"own_outputs": w4a16_gemm._EXPANDED_OUTPUTS}
        check(compiled(w4a16_gemm._expand, types, expanded, capability, 4, sizes=sizes), capability, tmp_path)
        constants |= {"own_rows": shape.rows, "own_outputs": shape.outputs, "whole": bool(absent)}
        for split in (False, True):
            own, constants = types | ({"y": "*fp32"} if split else {}), constants | {"split": split}
            program = compiled(w4a16_gemm._multiply_codes, own, constants, capability, shape.warps, shape.stages, sizes)
            check(program, capability, tmp_path)
    types |= {"sums": "*fp32", "splits": "i32"}
    constants = {"at_once": w4a16_gemm._SUMMED_AT_ONCE}
    check(compiled(w4a16_gemm._add_splits, types, constants, capability, 4), capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(
    ("dtype", "rows"), [(torch.bfloat16, 8), (torch.bfloat16, 512), (torch.bfloat16, 4096), (torch.float32, 8)]
)
def test_the_products_of_experts_fit(capability: int, dtype: torch.dtype, rows: int, tmp_path: Path) -> None:
    """Of both layouts: the inputs, or the outputs, of a weight lie side by side."""
    tile = GroupTile.of(rows, 16, dtype.itemsize)
    types = dict.fromkeys(("x", "weights", "bias", "y"), f"*{NAMES[dtype]}") | {"order": "*i64"}
    types |= dict.fromkeys(("starts", "tile_ends"), INTS) | {"shares": f"*{NAMES[dtype]}"}
    strides = ("expert_stride", "output_stride", "input_stride")
    types |= dict.fromkeys(("experts", "inputs", "outputs", "of_token", *strides), "i32")
    sizes = {"own_rows": tile.rows, "own_outputs": tile.outputs, "own_inputs": tile.inputs, "all_experts": 16}
    for side_by_side, absent in (("input_stride", ()), ("input_stride", ("bias", "shares")), ("output_stride", ())):
        constants = sizes | dict.fromkeys(absent) | {side_by_side: 1, "gathers": not absent}
        shape = tile.warps, tile.stages, ("inputs", "outputs")
        program = compiled(grouped_gemm._multiply_groups, types, constants, capability, *shape)
        check(program, capability, tmp_path)


def routing_kernels(dtype: torch.dtype) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Returns the kernels around the products of experts, with types and constants: of Mixtral, Qwen3 and DeepSeek."""
    data = f"*{NAMES[dtype]}"
    types = dict.fromkeys(("logits", "bias", "factors"), "*fp32") | {"numbers": "*i64", "shares": data}
    types |= {"factor": "fp32", "stride": "i32", "chosen": "*i64", "order": "*i64", "starts": INTS, "tile_ends": INTS}
    types |= dict.fromkeys(("rows", "size"), "i32") | dict.fromkeys(
        ("outputs", "shared", "gate", "residual", "total"), data
    )
    kernels: list[tuple[Any, dict[str, str], dict[str, Any]]] = []
    for experts, chosen, groups, kind in ((8, 2, 1, "*fp32"), (128, 8, 1, data), (256, 8, 8, "*fp32")):
        own = {"groups": groups, "of_group": experts // groups, "all_groups": groups, "width": experts // groups}
        own |= {"chosen": chosen, "all_chosen": chosen, "chosen_groups": 4, "group_scores": 2, "normalised": True}
        own |= {"sigmoid": groups > 1, "factors": None} | ({} if groups > 1 else {"bias": None})
        kernels.append((routing._route, types | {"logits": kind}, own))
        bins = triton.next_power_of_2(experts + 1)
        kernels.append((routing._group_rows, types, {"tile": 16, "at_once": 1024, "bins": bins}))
        kernels.append((routing._sum, types, {"count": chosen, "at_once": 1024, "gate": None}))
    return kernels


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_stands_around_the_products_of_experts_fits(capability: int, dtype: torch.dtype, tmp_path: Path) -> None:
    for kernel, types, constants in routing_kernels(dtype):
        warps = 1 if kernel is routing._route else 4
        check(compiled(kernel, types, constants, capability, warps), capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("kind", ["int4", "codebook", "int8", "fp8"])
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 8), (torch.bfloat16, 512)])
def test_the_products_of_quantized_experts_fit(
    capability: int, kind: str, dtype: torch.dtype, rows: int, tmp_path: Path
) -> None:
    tile = GroupTile.of(rows, 16, dtype.itemsize, quantized=True)
    types = dict.fromkeys(("x", "bias", "y"), f"*{NAMES[dtype]}") | dict.fromkeys(("scales", "zeros"), "*fp16")
    types |= {"codebook": "*fp32", "order": "*i64", "shares": "*fp32"}
    types |= dict.fromkeys(("starts", "tile_ends", "input_groups"), INTS) | {"input_order": "*i64"}
    types |= dict.fromkeys(("experts", "inputs", "outputs", "blocks", "of_token", "order_stride"), "i32")
    bits = w4a16_gemm.bits_of(kind)
    largest = 128 if bits == 4 else 64
    for block, absent in ((largest, ["zeros", "input_order", "bias"]), (64, []), (32, ["shares"])):
        constants: dict[str, Any] = dict.fromkeys([*absent, *(() if kind == "codebook" else ["codebook"])])
        constants |= {"kind": kind, "bits": bits, "block": block, "words": w4a16_gemm.WORDS, "gathers": block == 32}
        constants |= {"all_experts": 16, "own_rows": tile.rows, "own_outputs": tile.outputs, "whole": "bias" in absent}
        types["codes"] = {8: "*u8", 16: "*i16", 32: "*i32"}[bits * block // w4a16_gemm.WORDS]
        shape = tile.warps, tile.stages, ("inputs", "outputs")
        program = compiled(grouped_gemm._multiply_quantized_groups, types, constants, capability, *shape)
        check(program, capability, tmp_path)


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_rounding_to_fp8_fits(capability: int, tmp_path: Path) -> None:
    """Also where the gate or the norm before it is inside."""
    types = dict.fromkeys(("x", "added", "total", "weight", "bias"), "*bf16") | {"codes": "*u8", "scales": "*fp32"}
    types |= {"size": "i32", "rows": "i32", "eps": "fp32"}
    for at_once, gate in product((128, rounding._AT_ONCE), ("", "silu")):
        warps = max(1, at_once // rounding._OF_WARP)
        constants = {"at_once": at_once, "activation": gate, "gated": gate != ""}
        check(compiled(rounding._round_row, types, constants, capability, warps), capability, tmp_path)
    for size, together, added in ((4096, 0, True), (7168, 128, True), (8192, 0, False), (2048, 128, False)):
        width = triton.next_power_of_2(size)
        constants = {"size": size, "width": width, "together": together, "bias": None}
        constants |= {} if added else {"added": None}
        warps = norm_and_gate.warps_of(width)
        check(compiled(rounding._round_norm, types, constants, capability, warps), capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES | OLDER)
def test_sampling_fits(capability: int, tmp_path: Path) -> None:
    types = dict.fromkeys(("scores", "warped", "candidates"), "*fp32") | {"settings": "*fp64", "tokens": "i32"}
    types |= {"columns": INTS}
    types |= dict.fromkeys(("top_ks", "seeds", "steps", "sums", "chosen"), "*i64")
    for writes, (at_once, warps) in product((False, True), (sampling.SHAPE_OF_FEW, sampling.SHAPE_OF_MANY)):
        constants = {"writes": writes, "at_once": at_once}
        check(compiled(sampling._choose, types, constants, capability, warps), capability, tmp_path)


def few_rows_product(
    capability: int, rows: int, *, fp8: bool = False, gated: bool = False, norm: str = "", residual: bool = False
) -> Any:
    """norm: "rms", "layer", or "" for none."""
    tile = few_rows.FewRowsTile.of(rows)
    types = dict.fromkeys(("x", "weight", "residual", "y", "norm_weight"), "*bf16") | {"arrived": INTS, "eps": "fp32"}
    types |= dict.fromkeys(("scales", "bias", "sums", "norm_sums"), "*fp32") | ({"weight": "*u8"} if fp8 else {})
    types |= dict.fromkeys(("rows", "outputs", "inputs", "x_stride"), "i32")
    absent = {"scales": not fp8, "norm_weight": not norm, "norm_sums": norm != "layer", "residual": not residual}
    constants: dict[str, Any] = {name: None for name, none in absent.items() if none}
    constants |= {"bias": None} if norm != "layer" else {}
    constants |= {"grouped": False, "activation": "silu" if gated else "", "gated": gated, "whole": True, "split": True}
    constants |= {"parts_at_once": tile.parts_at_once, "own_rows": tile.rows}
    constants |= {"own_outputs": tile.outputs, "own_inputs": tile.inputs}
    sizes = ("outputs", "inputs")
    return compiled(few_rows._multiply_few, types, constants, capability, tile.warps, tile.stages, sizes)


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(
    "around",
    [{}, {"residual": True}, {"norm": "rms", "gated": True}, {"norm": "layer"}],
    ids=["bare", "residual", "norm and gate", "layer norm"],
)
@pytest.mark.parametrize(("rows", "fp8"), [(1, False), (1, True), (64, True)])
def test_products_with_few_rows_fit(
    capability: int, around: dict[str, Any], rows: int, fp8: bool, tmp_path: Path
) -> None:
    check(few_rows_product(capability, rows, fp8=fp8, **around), capability, tmp_path)


@pytest.mark.parametrize("capability", SHARED_BYTES | OLDER)
def test_the_argmax_fits(capability: int, tmp_path: Path) -> None:
    types = {"scores": "*fp16", "highest": "*fp32", "tokens": "i32", "stride": "i32"}
    types |= dict.fromkeys(("places", "found"), "*i64")
    check(compiled(argmax._highest_of_part, types, {"at_once": argmax._AT_ONCE}, capability, 4), capability, tmp_path)
    check(compiled(argmax._highest_of_row, types, {"parts": 32, "width": 32}, capability, 4), capability, tmp_path)


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_programs_that_are_started_early_wait_before_they_read(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is loaded from memory, nor stored, ahead of the wait."""
    made, plain = [], compiled

    def early(kernel: Any, types: Any, constants: Any, *rest: Any, **options: Any) -> Any:
        made.append(plain(kernel, types, constants | {"pdl": True}, *rest, **options))
        return made[-1]

    monkeypatch.setitem(globals(), "compiled", early)
    for in_one in (False, True):
        attention(capability, torch.bfloat16, 128, 4, prompts=False, in_one=in_one)
    few_rows_product(capability, 1, norm="rms", gated=True)
    types = dict.fromkeys(("x", "weight", "bias", "output"), "*bf16") | dict.fromkeys(("eps", "factor"), "fp32")
    types |= dict.fromkeys(("size", "x_row", "x_head"), "i32")
    constants = {"size": 4096, "width": 4096, "centred": False, "heads": 1, "residual": None}
    early(norm_and_gate._norm, types, constants, capability, 8)
    for kernel, own, sizes in routing_kernels(torch.bfloat16):
        early(kernel, own, sizes, capability, 4)
    early(norm_and_gate._activate, types, {"at_once": 1024, "activation": "silu", "gated": True}, capability, 4)
    for program in made:
        check(program, capability, tmp_path)
        before, wait, _ = program.asm["ptx"].partition("griddepcontrol.wait")
        assert wait
        assert not re.findall(r"\b(?:ld|st|atom|red)\.global|cp\.async", before)
