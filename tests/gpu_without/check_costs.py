"""The machine code of each kernel's main loop: what it costs beside what memory and tensor cores of a device allow."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu_without.check_compiled import INTS, attention, compiled, few_rows_product
from tests.gpu_without.sass import DEVICES, Code, spilled, waited_for
from tgi_server.engine.kernels.triton import few_rows, sampling, w4a16_gemm

HEAD_DIM, GROUP, KEY_TILE = 128, 4, 64
TENSOR_CORES = ("HMMA", "HGMMA")


def main_loop(code: Code) -> list[Any]:
    return next(loop for loop in code.loops if any(each.starts(*TENSOR_CORES) for each in loop))


@pytest.mark.parametrize("capability", DEVICES)
def test_decoding_loads_ahead_and_waits_for_memory_alone(capability: int, tmp_path: Path) -> None:
    device = DEVICES[capability]
    attend, join = (
        Code.of(program, tmp_path) for program in attention(capability, torch.bfloat16, HEAD_DIM, GROUP, prompts=False)
    )
    loop = main_loop(attend)
    assert attend.buffers("bf16") >= 2
    assert not waited_for(loop)
    assert not spilled(loop)
    keys_and_values = 2 * 2 * KEY_TILE * HEAD_DIM
    assert attend.cycles(loop) < 0.5 * keys_and_values / device.bandwidth
    assert attend.blocks(capability) >= {80: 2, 90: 3, 120: 1}[capability]
    assert not join.loops, "all parts are joined in one look"


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize(("rows", "programs"), [(128, 8), (64, 1)])
def test_prompts_keep_tensor_cores_busy(rows: int, programs: float, capability: int, tmp_path: Path) -> None:
    """Instructions that are no products take less time than these, and in the first loop none is a mask's."""
    program, _ = attention(capability, torch.bfloat16, HEAD_DIM, GROUP, prompts=True, programs=programs)
    code = Code.of(program, tmp_path)
    inner, masked = [loop for loop in code.loops if any(each.starts(*TENSOR_CORES) for each in loop)]
    assert code.buffers("bf16") >= 2
    assert not waited_for(inner)
    # Triton 3.7 reads one spilled register back in a loop of 563 instructions, for 12.0 and 128 rows
    assert sum(each.starts("LDL", "STL") for each in inner + masked) <= 1
    selects = [sum(each.starts("FSEL") for each in loop) for loop in (inner, masked)]
    assert selects[0] <= 8 < selects[1]
    products = 2 * 2 * rows * KEY_TILE * HEAD_DIM
    assert code.cycles(inner) < products / DEVICES[capability].products


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize(("kind", "block"), [("int4", 128), ("fp8", 64)])
def test_few_rows_by_quantized_weights_wait_for_memory(kind: str, block: int, capability: int, tmp_path: Path) -> None:
    """Codes become numbers in registers, and do not go to shared memory and back."""
    tile = w4a16_gemm.ProductTile.of(1, 2)
    types = dict.fromkeys(("x", "residual"), "*bf16") | {"scales": "*fp16", "y": "*fp32", "groups": INTS}
    types |= dict.fromkeys(("rows", "outputs", "inputs", "blocks", "share", "x_stride"), "i32") | {"codes": "*i32"}
    constants: dict[str, Any] = dict.fromkeys(("zeros", "order", "bias", "residual", "codebook"))
    constants |= {"kind": kind, "bits": w4a16_gemm.bits_of(kind), "block": block, "words": w4a16_gemm.WORDS}
    constants |= {"own_rows": tile.rows, "own_outputs": tile.outputs}
    constants |= {"whole": True, "split": True}
    shape = tile.warps, tile.stages, ("inputs", "outputs")
    code = Code.of(compiled(w4a16_gemm._multiply_codes, types, constants, capability, *shape), tmp_path)
    loop = main_loop(code)
    assert code.buffers("i32") >= 3
    assert not waited_for(loop)
    assert not any(each.starts("I2F") for each in loop)
    assert sum(each.starts("STS") for each in loop) <= 4, "scales alone change hands, weights stay where they are"
    size = tile.outputs * w4a16_gemm.WORDS * 4
    assert code.cycles(loop) < 1.5 * size / DEVICES[capability].bandwidth
    assert code.blocks(capability) >= {80: 4, 90: 4, 120: 3}[capability]


@pytest.mark.parametrize("capability", DEVICES)
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "FP8"])
@pytest.mark.parametrize("around", [{"residual": True}, {"norm": "rms", "gated": True}], ids=["residual", "norm, gate"])
def test_few_rows_wait_for_the_weight(around: dict[str, Any], fp8: bool, capability: int, tmp_path: Path) -> None:
    """Also with the norm inside, and with weights that become bfloat16 in registers."""
    tile = few_rows.FewRowsTile.of(1)
    code = Code.of(few_rows_product(capability, 1, fp8=fp8, **around), tmp_path)
    loop = main_loop(code)
    assert code.buffers("i8" if fp8 else "bf16") >= 3
    assert not waited_for(loop)
    assert not spilled(loop)
    size = tile.outputs * tile.inputs * (1 if fp8 else 2)
    assert code.cycles(loop) < (0.9 if fp8 else 0.4) * size / DEVICES[capability].bandwidth
    assert code.blocks(capability) >= {80: 2, 90: 2, 120: 1}[capability]


@pytest.mark.parametrize("capability", DEVICES)
def test_sampling_looks_at_a_row_without_barriers(capability: int, tmp_path: Path) -> None:
    types = dict.fromkeys(("scores", "warped", "candidates"), "*fp32") | {"settings": "*fp64", "columns": INTS}
    types |= dict.fromkeys(("top_ks", "seeds", "steps", "sums", "chosen"), "*i64") | {"tokens": "i32"}
    at_once, warps = sampling.SHAPE_OF_MANY
    constants = {"writes": False, "at_once": at_once}
    code = Code.of(compiled(sampling._choose, types, constants, capability, warps), tmp_path)
    assert code.blocks(capability) >= {80: 2, 90: 2, 120: 1}[capability]
    assert not any(spilled(loop) for loop in code.loops)
    highest, collected = code.loop("FMNMX", "LDG"), code.loop("STG", "LDG")
    assert not any(each.starts("BAR", "STS") for each in highest + collected)
    per_turn = at_once / 32 / warps  # tokens of a thread
    assert len(collected) <= 24 * per_turn
