"""The CPU's own layers and kernels against those of torch."""

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, silu

from tgi_server.engine.attention.base import ForwardMetadata, GreedyOnly
from tgi_server.engine.cpu.head import ScreenedHead
from tgi_server.engine.cpu.int8 import Int8Linear
from tgi_server.engine.cpu.linear import Bf16Linear, PackedLinear
from tgi_server.engine.grammar import PendingMask
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.sampling.token_mask import TokenMask

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 7, 8, 9, 40, 100]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_packed_linears_joined_are_the_linears_side_by_side(dtype, rows) -> None:
    first, second = nn.Linear(48, 32, dtype=dtype), nn.Linear(48, 80, bias=False, dtype=dtype)
    x, residual = torch.randn(rows, 48, dtype=dtype), torch.randn(rows, 112, dtype=dtype)
    joined = PackedLinear.joined(first, second)
    wanted = torch.cat([first(x), second(x)], -1)
    torch.testing.assert_close(joined(x), wanted, **tolerance(dtype))
    torch.testing.assert_close(joined(x, activation="relu"), wanted.relu(), **tolerance(dtype))
    torch.testing.assert_close(joined.add_to(residual, x), residual + wanted, **tolerance(dtype))


@pytest.mark.skipif(not Bf16Linear.supports(torch.bfloat16), reason="this CPU has no AVX-512 BF16")
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (51, 131), (3500, 70)])
def test_bf16_linear_is_the_linear_of_torch(rows, inputs, outputs) -> None:
    linear = nn.Linear(inputs, outputs, dtype=torch.bfloat16)
    x, residual = torch.randn(rows, inputs).bfloat16(), torch.randn(rows, outputs).bfloat16()
    layer = Bf16Linear(linear.weight, linear.bias)
    wanted = linear.float()(x.float())
    close = {"rtol": 1e-2, "atol": 1e-2, "check_dtype": False}
    torch.testing.assert_close(layer(x), wanted, **close)
    torch.testing.assert_close(layer(x, activation="relu"), wanted.relu(), **close)
    torch.testing.assert_close(layer.add_to(residual, x), wanted + residual, **close)
    torch.testing.assert_close(layer.unpacked().weight, linear.weight.bfloat16())
    torch.testing.assert_close(layer.unpacked().bias, linear.bias.bfloat16())


@pytest.mark.skipif(not (load_kernels() and Int8Linear.supported()), reason="this CPU has no AVX-512 VNNI")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (50, 131), (7000, 70)])
def test_int8_linear_is_exact_for_what_8_bits_can_hold(dtype, rows, inputs, outputs) -> None:
    # Whole numbers up to 127 that reach it in every row are rounded by nobody.
    weight = torch.randint(-127, 128, (outputs, inputs)).to(dtype)
    x = torch.randint(-127, 128, (rows, inputs)).to(dtype)
    weight[:, 0], x[:, 0] = 127, -127
    bias, residual = torch.randn(outputs, dtype=dtype), torch.randn(rows, outputs, dtype=dtype)
    layer = Int8Linear(weight, bias)
    wanted = linear(x.double(), weight.double(), bias.double())
    exact = {"rtol": 1e-5, "atol": 1e-2} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(layer(x).double(), wanted, **exact)
    torch.testing.assert_close(layer(x, activation="relu").double(), wanted.relu(), **exact)
    torch.testing.assert_close(layer.add_to(residual, x).double(), wanted + residual, **exact)


@pytest.mark.skipif(not (load_kernels() and Int8Linear.supported()), reason="this CPU has no AVX-512 VNNI")
def test_int8_linear_is_close_for_any_numbers() -> None:
    weight, x = torch.randn(300, 200) * 0.02, torch.randn(9, 200)
    x[3] = 0
    wanted = linear(x, weight)
    actual = Int8Linear(weight)(x)
    assert float((actual - wanted).norm() / wanted.norm()) < 0.02
    assert actual[3].abs().max() == 0


def _outliers(rows: int, size: int) -> torch.Tensor:
    values = torch.randn(rows, size)
    values[:, ::37] *= 30
    return values


_INPUTS = {
    "random": torch.randn,
    "outliers": _outliers,
    "zeros": torch.zeros,
    "infinite": lambda *shape: torch.full(shape, torch.inf),
    "no numbers": lambda *shape: torch.full(shape, torch.nan),
    "huge": lambda *shape: torch.randn(shape) * 1e37,
    "tiny": lambda *shape: torch.randn(shape) * 1e-37,
}


def greedy_pass(mask: PendingMask | None) -> ForwardMetadata:
    """A pass of which no more is needed than the largest logit of each row."""
    empty = torch.empty(0, dtype=torch.int32)
    return ForwardMetadata(empty, empty, empty, empty, 0, [], 0, greedy=GreedyOnly(mask))


SCREENING = pytest.mark.skipif(
    not ScreenedHead.pays(torch.zeros(1 << 14, 1 << 10).bfloat16()), reason="needs AVX-512 BF16, VNNI"
)


@SCREENING
@pytest.mark.parametrize("inputs", _INPUTS)
@pytest.mark.parametrize("weights", ["random", "alike", "outliers", "with no numbers"])
def test_a_screened_head_finds_the_largest_output_as_if_it_had_computed_all(weights, inputs) -> None:
    weight = (_outliers if weights == "outliers" else torch.randn)(7001, 96)
    if weights == "alike":  # so close to each other that many outputs are equal once they are rounded
        weight = weight[:1] + torch.randn(7001, 96) * 1e-3
    if weights == "with no numbers":
        weight[5000, 3] = torch.nan
    head = ScreenedHead(weight.bfloat16())
    for rows in (1, 2, 7, 8, 9):
        x = _INPUTS[inputs](rows, 96).bfloat16()
        wanted, actual = head(x), head(x, metadata=greedy_pass(None))
        torch.testing.assert_close(torch.ops.oatmill.argmax(actual), torch.ops.oatmill.argmax(wanted))
        left_out = actual == -torch.inf
        torch.testing.assert_close(actual[~left_out], wanted[~left_out], rtol=0, atol=0, equal_nan=True)
        if (weights, inputs) == ("random", "random"):
            assert bool(left_out.any()) == (rows <= 8)


@SCREENING
@pytest.mark.parametrize("inputs", ["random", "outliers", "infinite", "no numbers"])
@pytest.mark.parametrize("words", [1, 150, 219])
def test_a_screened_head_finds_the_largest_of_what_masks_allow(words, inputs) -> None:
    head = ScreenedHead(torch.randn(7001, 96).bfloat16())
    everywhere, nowhere = torch.full((2, words), -1, dtype=torch.int32), torch.zeros(2, words, dtype=torch.int32)
    one = nowhere[:1].clone()
    one[0, words // 2] = 1 << 30
    rare = torch.randint(-(2**31), 2**31, (6, 2, words)).to(torch.int32).unbind()
    bits = torch.cat([one, rare[0] & rare[1] & rare[2] & rare[3] & rare[4] & rare[5], everywhere[:1], nowhere[:1]])
    for rows in (1, 5, 8, 9):
        positions = torch.randperm(max(rows, 5))[:5].tolist()
        chosen = [i for i, position in enumerate(positions) if position < rows]
        mask = TokenMask(bits[chosen], [positions[i] for i in chosen])
        x = _INPUTS[inputs](rows, 96).bfloat16()
        pending = PendingMask(mask.bits, mask.positions, None, x.device)
        wanted, actual = head(x), head(x, metadata=greedy_pass(pending))
        largest = [torch.ops.oatmill.argmax(each, mask.bits, mask.positions) for each in (actual, wanted)]
        torch.testing.assert_close(*largest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [16, 40, 960])
def test_norms_and_gated_silu_are_those_of_transformers(dtype, size) -> None:
    x, weight, bias = torch.randn(7, size, dtype=dtype), *torch.randn(2, size, dtype=dtype)
    wanted = layer_norm(x + 3, (size,), weight, bias, 1e-6)
    torch.testing.assert_close(torch.ops.oatmill.layer_norm(x + 3, weight, bias, 1e-6), wanted, **tolerance(dtype))
    wide = x.float()
    wanted = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(dtype)
    torch.testing.assert_close(torch.ops.oatmill.rms_norm(x, weight, 1e-6), wanted, **tolerance(dtype))
    gate, up = 10 * torch.randn(2, 7, size, dtype=dtype)
    gated = torch.ops.oatmill.silu_mul(torch.cat([gate, up], -1))
    torch.testing.assert_close(gated, silu(gate) * up, **tolerance(dtype))


def test_silu_far_from_zero_neither_overflows_nor_turns_to_nan() -> None:
    gate = torch.tensor([-1e30, -200.0, -88.5, 0.0, 88.5, 200.0, 1e30] + [0.0] * 9)
    gated = torch.ops.oatmill.silu_mul(torch.cat([gate, torch.ones(16)]).unsqueeze(0))
    torch.testing.assert_close(gated[0], silu(gate), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 16, 1000])
def test_argmax_is_the_first_of_the_largest(dtype, size) -> None:
    scores = torch.randint(-5, 5, (30, size)).to(dtype)
    scores[0] = -torch.inf
    largest = scores.max(-1, keepdim=True).values
    first = (scores == largest).int().argmax(-1)
    assert torch.ops.oatmill.argmax(scores).tolist() == first.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [40, 64, 1000, 3000])
def test_argmax_among_what_masks_allow(dtype, size) -> None:
    scores = torch.randint(-50, 50, (5, size)).to(dtype)
    words = -(-size // 32) - 1
    allowed = torch.rand(3, 32 * words) < 0.1
    allowed[:2, 3], allowed[2] = True, False
    bits = (allowed.view(3, words, 32).long() << torch.arange(32)).sum(-1)
    masks = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)
    chosen = torch.ops.oatmill.argmax(scores, masks, [4, 1, 2])
    wanted = scores.float()
    for mask, row in zip(allowed, (4, 1, 2), strict=True):
        wanted[row, : len(mask)][~mask] = -torch.inf
        wanted[row, len(mask) :] = -torch.inf
    assert chosen.tolist() == wanted.argmax(1).tolist()
    logprobs = torch.ops.oatmill.peak_logprobs(scores, chosen, [1, 0, 4], masks, [4, 1, 2])
    torch.testing.assert_close(logprobs, wanted.log_softmax(1).amax(1)[[1, 0, 4]])
