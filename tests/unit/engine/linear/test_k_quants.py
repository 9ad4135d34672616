"""Linear layers with K-quants and inputs of 8 bits: groups have integer factors, and blocks of 256 inputs a scale."""

import numpy as np
import pytest
import torch
from torch.nn.functional import linear

from tests.gguf_models import HALVES, random_blocks
from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.checkpoint.quantized.formats.gguf import quantized_weight
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.quantized import PackedQuantizedLinear, packed_kind_of

OUTPUTS, BLOCK = 115, 256
KINDS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


def weight_of(kind: str, blocks: int, byte: int | None = None) -> QuantizedWeight:
    """Returns a weight of random blocks. byte: what all bytes but the scales are."""
    stored = random_blocks(kind, OUTPUTS, blocks * BLOCK).reshape(OUTPUTS, blocks, -1)
    if byte is not None:
        scales = {"Q2_K": slice(80, 84), "Q3_K": slice(108, 110), "Q6_K": slice(208, 210)}.get(kind, slice(0, 4))
        kept = stored[..., scales].copy()
        stored[:] = byte
        stored[..., scales] = kept
    return quantized_weight(kind, torch.from_numpy(stored))


def layer_of(weight: QuantizedWeight) -> PackedQuantizedLinear:
    kind = packed_kind_of(weight)
    name = {"int4": "w4a8", "int6": "w6a8"}[kind]
    if name not in torch.ops.oatmill.quantized_kernels(kind):
        pytest.skip(f"this CPU has no {name}")
    return PackedQuantizedLinear(weight, None, KernelTable.of(name))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_to_the_last_bit_whatever_is_beside_it(kind) -> None:
    layer, x = layer_of(weight_of(kind, 3)), torch.randn(130, 3 * BLOCK).bfloat16()
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (2, 3, 4, 5, 7, 8, 9, 16, 31, 33, 95, 96, 97, 130):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_inputs_loses_no_more_than_8_bits(kind) -> None:
    weight, x = weight_of(kind, 3), torch.randn(40, 3 * BLOCK)
    exact = linear(x.double(), weight.dense().double())
    assert (layer_of(weight)(x) - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_input_takes_precision_from_its_block_only(kind) -> None:
    weight, x = weight_of(kind, 3), torch.randn(5, 3 * BLOCK)
    x[:, 256:512], x[:, 300] = 0, 1000
    layer, others = layer_of(weight), x.clone()
    others[:, 300] = 0
    difference, wanted = layer(x) - layer(others), x[:, 300:301] * weight.dense()[:, 300]
    torch.testing.assert_close(difference, wanted, rtol=1e-4, atol=0.5)  # offsets are rounded to a unit


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("byte", [0x00, 0x0F, 0x7F, 0xFF])
def test_the_largest_codes_factors_and_inputs_do_not_overflow(kind, byte) -> None:
    weight = weight_of(kind, 1, byte)
    layer, dense = layer_of(weight), weight.dense().double()
    signs = torch.ones(6, BLOCK)  # exact in 8 bits
    signs[1] = -1
    signs[2, ::2] = -1
    signs[3, 2::4], signs[3, 3::4] = -1, -1  # products of two neighbours are added up first
    signs[4, ::4], signs[4, 1::4] = -1, -1
    signs[5] = torch.randn(BLOCK).sign()
    for rows in (signs, signs.repeat(3, 1)):
        exact = linear(rows.double(), dense)
        # Offsets are rounded to a unit; what overflows is off by more than the largest weight.
        torch.testing.assert_close(layer(rows).double(), exact, rtol=2e-3, atol=1e-3 * float(dense.abs().max()))


@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q5_K"])
@pytest.mark.parametrize("scales", [(0.0, 0.01), (0.01, 0.0), (0.0, 0.0), (1e-5, 0.3), (2e-4, 0.3), (0.3, 1e-5)])
def test_scales_of_blocks_may_be_zero_or_much_smaller_than_those_of_offsets(kind, scales) -> None:
    stored = random_blocks(kind, OUTPUTS, 3 * BLOCK).reshape(OUTPUTS, 3, -1)
    for first, number in zip(HALVES[kind], scales, strict=True):
        stored[:, 1, first : first + 2] = np.array([number], np.float16).view(np.uint8)
    weight, x = quantized_weight(kind, torch.from_numpy(stored)), torch.randn(20, 3 * BLOCK)
    layer, exact = layer_of(weight)(x), linear(x.double(), weight.dense().double())
    assert (layer - exact).norm() < 0.02 * exact.norm()
    assert torch.equal(layer_of(weight)(x[:3]), layer[:3])
