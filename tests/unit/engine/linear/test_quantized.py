"""Linear layers with codes against torch in float64, by every kernel of this CPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from tests.gguf_models import random_blocks
from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.checkpoint.quantized.formats.gguf import quantized_weight
from tgi_server.engine.checkpoint.quantized.formats.mxfp4 import CODEBOOK as MXFP4
from tgi_server.engine.checkpoint.quantized.rounding import _FP4, _NF4
from tgi_server.engine.checkpoint.quantized.weight import LINE, paired
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.choice import Weights, choose_kernels
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.quantized import PackedQuantizedLinear, packed_kind_of

ROWS = [1, 2, 3, 4, 5, 6, 7, 9, 17, 33, 100, 300]
SHAPES = [(64, 48), (60, 131), (352, 70), (32, 1600)]
NF4, FP4 = torch.tensor(_NF4), torch.tensor(_FP4)
KINDS = ["int4", "int4 without offsets", "codebook", "int6", "int6 with offsets", "int8", "int8 with offsets", "fp8"]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


def random_weight(kind: str, inputs: int, outputs: int, groups: torch.Tensor | None = None) -> QuantizedWeight:
    count = -(-inputs // 32) if groups is None else int(groups.max()) + 1
    scales = torch.rand(outputs, count) * inputs**-0.5 / 8
    groups = torch.arange(inputs) // 32 if groups is None else groups
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    if kind.startswith("int4"):
        zeros = torch.full(scales.shape, 8.0) if "without" in kind else torch.randint(0, 17, scales.shape).float()
        return QuantizedWeight.of(paired(codes), scales, zeros, codebook=LINE, groups=groups)
    if kind == "codebook":
        return QuantizedWeight.of(paired(codes), scales, codebook=torch.randn(16) * 4, groups=groups)
    if kind == "fp8":
        small = torch.cat([torch.randn(outputs, inputs - 8), torch.randn(outputs, 8) * 2**-8], 1)  # some are subnormal
        return QuantizedWeight.of(small.to(torch.float8_e4m3fn), scales, groups=groups)
    most = 32 if kind.startswith("int6") else 128
    codes = torch.randint(-most, most, (outputs, inputs)).to(torch.int8)
    zeros = torch.randint(-9, 9, scales.shape).float() if "with" in kind else None
    weight = QuantizedWeight.of(codes, scales * 8 / most, zeros, groups=groups)
    return replace(weight, six_bits=most == 32)


def require(kernel: str, kind: str) -> None:
    if kernel not in torch.ops.oatmill.quantized_kernels(kind.split()[0]):
        pytest.skip(f"this CPU has no {kernel}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_every_kernel_is_the_linear_of_torch_for_any_number_of_rows(kind, inputs, outputs) -> None:
    weight, bias = random_weight(kind, inputs, outputs), torch.randn(outputs)
    dense = weight.dense().double()
    kernels = torch.ops.oatmill.quantized_kernels(packed_kind_of(weight))
    for name in kernels:
        layer = PackedQuantizedLinear(weight, bias, KernelTable.of(name))
        rounded = "bf16" in name or "amx" in name
        close = {"rtol": 1e-2, "atol": 2e-2} if rounded else {"rtol": 1e-5, "atol": 1e-5}
        if name in ("w4a8", "w6a8", "w8a8"):
            close = {"rtol": 1e-2, "atol": 5e-2}
        if name in ("w4a16", "w6a16", "w8a16"):
            close = {"rtol": 1e-4, "atol": 5e-4} if kind != "codebook" else {"rtol": 1e-3, "atol": 2e-3}
        for rows in ROWS if not name.endswith("emulated") else ROWS[::4]:
            x, residual = torch.randn(rows, inputs), torch.randn(rows, outputs)
            wanted = linear(x.double(), dense, bias.double())
            for actual, expected in (
                (layer(x), wanted),
                (layer.add_to(residual, x), wanted + residual),
            ):
                torch.testing.assert_close(actual.double(), expected, **close, msg=lambda text, n=name: f"{n}: {text}")
        torch.testing.assert_close(layer.unpacked().weight, weight.dense(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_the_chosen_kernels_are_as_exact_as_the_dequantized_weights(kind) -> None:
    groups = torch.arange(384) // 128
    weight, x = random_weight(kind, 384, 96, groups), torch.randn(40, 384)
    assert weight.scales.dtype == torch.float32
    assert not torch.equal(weight.scales, weight.scales.bfloat16().float()), "no 16 bits hold these"
    table = choose_kernels(Weights.quantized(packed_kind_of(weight), torch.float32))
    exact, dense = linear(x.double(), weight.dense().double()), linear(x, weight.dense())
    error, usual = ((y.double() - exact).norm() for y in (PackedQuantizedLinear(weight, None, table)(x), dense))
    assert error <= 4 * usual
    assert error <= 1e-6 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_activations_of_16_bits_are_taken_as_they_are(dtype) -> None:
    weight, x = random_weight("codebook", 96, 70), torch.randn(5, 96).to(dtype)
    actual = PackedQuantizedLinear(weight, dtype=dtype)(x)
    assert actual.dtype == dtype
    assert torch.equal(actual, PackedQuantizedLinear(weight)(x.float()).to(dtype))


@pytest.mark.parametrize("rows", [3, 254])
def test_floats_of_8_bits_stay_what_they_are(rows) -> None:
    codes = torch.cat([torch.arange(0, 127), torch.arange(128, 255)]).to(torch.uint8)  # all but NaN
    weight = QuantizedWeight.of(codes.view(torch.float8_e4m3fn).expand(50, -1), torch.full((50, 1), 0.5))
    for name in torch.ops.oatmill.quantized_kernels("fp8"):
        actual = PackedQuantizedLinear(weight, None, KernelTable.of(name))(torch.eye(254)[:rows])
        assert torch.equal(actual, weight.dense().T[:rows]), name


@pytest.mark.parametrize("name", ["fma", "fma_dequant"])
@pytest.mark.parametrize("kind", ["int4", "codebook", "fp8"])
def test_groups_may_have_any_inputs_in_any_order(kind, name) -> None:
    groups = torch.randint(0, 5, (77,))
    weight, x = random_weight(kind, 77, 50, groups), torch.randn(3, 77)
    actual = PackedQuantizedLinear(weight, None, KernelTable.of(name))(x)
    torch.testing.assert_close(actual, linear(x, weight.dense()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["w4a8", "w6a8", "w8a8", "bf16"])
@pytest.mark.parametrize("kind", ["int4", "codebook", "int6", "int8", "int8 with offsets", "fp8"])
def test_inputs_rounded_to_8_bits_lose_no_more_than_that(kind, name) -> None:
    """Groups of all sizes: one input, what does not fill the words that are summed together, and what is too large."""
    require(name, kind)
    groups = torch.arange(5).repeat_interleave(torch.tensor([1, 40, 64, 200, 60]))
    weight, x = random_weight(kind, 365, 70, groups), torch.randn(6, 365)
    exact = linear(x, weight.dense())
    error = (PackedQuantizedLinear(weight, None, KernelTable.of(name))(x) - exact).norm() / exact.norm()
    assert error < (0.01 if kind == "int4" else 0.02)


@pytest.mark.parametrize(("name", "kind"), [("w4a8", "int4"), ("w6a8", "int6"), ("w8a8", "int8")])
def test_a_large_input_takes_precision_from_its_128_neighbours_only(name, kind) -> None:
    require(name, kind)
    weight, x = random_weight(kind, 512, 70, torch.zeros(512, dtype=torch.long)), torch.randn(3, 512)
    x[:, :128], x[:, 0] = 0, 1000
    layer = PackedQuantizedLinear(weight, None, KernelTable.of(name))
    others = x.clone()
    others[:, 0] = 0
    difference, wanted = layer(x) - layer(others), x[:, :1] * weight.dense()[:, 0]
    torch.testing.assert_close(difference, wanted, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("kind", ["int4", "int4 without offsets", "int8", "int8 with offsets"])
def test_inputs_rounded_to_16_bits_are_bfloat16_numbers_as_they_were(kind) -> None:
    """Down to 1/128 of the largest of a group; groups of all sizes, also larger than a sum holds, in any order."""
    groups = torch.arange(5).repeat_interleave(torch.tensor([1, 40, 64, 700, 60]))[torch.randperm(865)]
    weight = random_weight(kind, 865, 70, groups)
    x = (torch.randn(7, 865).sign() * (torch.rand(7, 865) + 2**-6)).bfloat16()
    for scale in (1.0, 2.0**-60, 2.0**60):
        actual = PackedQuantizedLinear(weight, None, KernelTable.of("w4a16"))((x * scale).float())
        torch.testing.assert_close(actual / scale, linear(x.float(), weight.dense()), rtol=1e-4, atol=1e-4)


def with_codebook(
    codebook: torch.Tensor, codes: torch.Tensor, groups: torch.Tensor
) -> tuple[PackedQuantizedLinear, torch.Tensor]:
    """Returns a layer whose inputs and codebook are rounded, and its weight in float64."""
    require("w4a16", "codebook")
    scales = torch.rand(len(codes), int(groups.max()) + 1) + 0.1
    weight = QuantizedWeight.of(paired(codes), scales, codebook=codebook, groups=groups)
    return PackedQuantizedLinear(weight, None, KernelTable.of("w4a16")), weight.dense().double()


@pytest.mark.parametrize("codebook", [FP4, MXFP4], ids=["fp4", "mxfp4"])
def test_codebooks_of_fp4_are_whole_numbers_as_they_are(codebook) -> None:
    """With inputs in bfloat16 from 1/32 of the largest of a group on; groups of all sizes, in any order."""
    groups = torch.arange(5).repeat_interleave(torch.tensor([1, 40, 64, 300, 60]))[torch.randperm(465)]
    layer, dense = with_codebook(codebook, torch.randint(0, 16, (70, 465), dtype=torch.uint8), groups)
    x = (torch.randn(9, 465).sign() * (torch.rand(9, 465) + 2**-4)).bfloat16().float()
    for rows in range(1, 10):
        torch.testing.assert_close(layer(x[:rows]).double(), linear(x[:rows].double(), dense), rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (265, 131), (352, 70)])
@pytest.mark.parametrize("reordered", [False, True])
def test_a_codebook_loses_a_fraction_of_what_bfloat16_does(inputs, outputs, reordered) -> None:
    groups = torch.arange(inputs) // 64
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    layer, dense = with_codebook(NF4, codes, groups[torch.randperm(inputs)] if reordered else groups)
    x = torch.randn(9, inputs).bfloat16().float()
    for rows in range(1, 10):
        exact = linear(x[:rows].double(), dense)
        assert (layer(x[:rows]) - exact).norm() < (exact.bfloat16() - exact).norm() / 2


@pytest.mark.parametrize("rows", [1, 2, 4, 9])
@pytest.mark.parametrize("largest", [1.9921875, 2 - 2**-20])
def test_sums_of_the_largest_numbers_of_a_codebook_do_not_overflow(rows, largest) -> None:
    groups = torch.arange(3).repeat_interleave(torch.tensor([64, 128, 72]))
    codes = torch.zeros(70, 264, dtype=torch.uint8)
    codes[35:] = 15  # -1 and 1
    layer, dense = with_codebook(NF4, codes, groups)
    for x in (torch.full((rows, 264), largest), torch.full((rows, 264), -largest)):
        torch.testing.assert_close(layer(x).double(), linear(x.double(), dense), rtol=2e-4, atol=0)


def test_inputs_rounded_to_16_bits_that_are_no_numbers_stay_so() -> None:
    layer, x = PackedQuantizedLinear(random_weight("int4", 128, 70), None, KernelTable.of("w4a16")), torch.randn(6, 128)
    x[1, 40], x[3, 100], x[5] = torch.nan, torch.inf, 0
    y = layer(x)
    assert y[[1, 3]].isnan().all()
    assert y[[0, 2, 4]].isfinite().all()
    assert not y[5].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["fma", "fma_dequant"])
def test_scales_of_16_bits_stay_so(dtype, name) -> None:
    weight, x = random_weight("int4", 128, 70), torch.randn(5, 128)
    unit = 1.0 if dtype == torch.float16 else 2.0**-20  # so small that float16 has too few bits for it
    weight = replace(weight, stored_scales=(weight.scales * unit).to(dtype).float())
    layer = PackedQuantizedLinear(weight, None, KernelTable.of(name))
    assert layer._scales.dtype == dtype
    torch.testing.assert_close(layer(x) / unit, linear(x, weight.dense()) / unit, rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.unpacked().weight, weight.dense())


@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("name", ["fma", "w4a16", "bf16"])
@pytest.mark.parametrize("place", [-5.0, 7.5, 17.0, 40.0, 300.0])
def test_zeros_may_be_any_numbers(place, name, rows) -> None:
    require(name, "int4")
    weight, x = random_weight("int4", 128, 70), torch.randn(rows, 128).bfloat16()
    weight = replace(weight, zeros=torch.full_like(weight.scales, place))
    layer, wanted = PackedQuantizedLinear(weight, None, KernelTable.of(name)), linear(x.float(), weight.dense())
    torch.testing.assert_close(layer(x).float(), wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max()))


@pytest.mark.parametrize("kind", ["int4", "codebook", "int6", "int8 with offsets", "fp8"])
@pytest.mark.parametrize("name", ["fma", "w4a8", "w6a8", "w8a8", "w4a16", "w6a16", "w8a16", "bf16"])
def test_a_row_is_the_same_to_the_last_bit_whatever_is_beside_it(name, kind) -> None:
    require(name, kind)
    layer = PackedQuantizedLinear(random_weight(kind, 200, 100), None, KernelTable.of(name))
    x = torch.randn(40, 200)
    whole = layer(x)
    for rows in (1, 2, 3, 4, 5, 6, 7, 13):
        assert torch.equal(layer(x[:rows]), whole[:rows])


# With AMX, matrices of 16 rows are multiplied by other instructions than fewer ones: both sum integers.
@pytest.mark.parametrize("group", [16, 32, 48, 64, 128, 512])
@pytest.mark.parametrize(("name", "kind"), [("w4a8", "int4"), ("w6a8", "int6 with offsets"), ("w8a8", "int8")])
def test_many_rows_are_to_the_last_bit_what_each_gives_alone(name, kind, group) -> None:
    require(name, kind)
    layer = PackedQuantizedLinear(random_weight(kind, 530, 100, torch.arange(530) // group), None, KernelTable.of(name))
    x = torch.randn(130, 530).bfloat16()
    alone = torch.cat([layer(row) for row in x.split(1)])
    for rows in (15, 16, 17, 31, 32, 40, 48, 95, 96, 130):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


def test_weights_joined_are_the_layers_side_by_side() -> None:
    first, second, x = random_weight("int4", 64, 50), random_weight("int4 without offsets", 64, 70), torch.randn(3, 64)
    assert first.joins(second)
    assert not first.joins(random_weight("codebook", 64, 50))
    assert not first.joins(random_weight("int4", 64, 50, torch.arange(64) % 2))
    joined = PackedQuantizedLinear(QuantizedWeight.joined([first, second]))(x)
    wanted = torch.cat([linear(x, first.dense()), linear(x, second.dense())], -1)
    torch.testing.assert_close(joined, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("name", ["fma", "w4a8", "w4a16", "w6a8", "w6a16", "bf16"])
@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"])
def test_factors_of_blocks_are_multiplied_as_they_are_read(kind, name, rows) -> None:
    weight = quantized_weight(kind, torch.from_numpy(random_blocks(kind, 70, 512)).view(70, 2, -1))
    require(name, packed_kind_of(weight))
    x = torch.randn(rows, 512).bfloat16()
    layer, wanted = PackedQuantizedLinear(weight, None, KernelTable.of(name)), linear(x.float(), weight.dense())
    assert layer._scale_factors is not None
    torch.testing.assert_close(layer(x).float(), wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().max()))
    assert torch.equal(layer.unpacked().weight, weight.dense())
