"""Linear layers whose weights are rounded to 8 bits against torch in float64, by every kernel of this CPU."""

import pytest
import torch
from torch.nn.functional import linear

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.choice import Weights, choose_kernels
from tgi_server.engine.linear.int8 import Int8Linear
from tgi_server.engine.linear.kernel_table import KernelTable

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [*range(1, 18), 31, 32, 33, 64, 100, 300]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


def kernels_of(dtype: torch.dtype) -> tuple[str, ...]:
    weights = Weights.quantized("int8", dtype)
    return *weights.kernels, *weights.by_name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (50, 131), (1088, 70)])
def test_every_kernel_is_exact_for_what_8_bits_can_hold(dtype, inputs, outputs) -> None:
    # Whole numbers up to 127 that reach it in every group of a row are rounded by nobody.
    weight = torch.randint(-127, 128, (outputs, inputs)).to(dtype)
    weight[:, 0] = 127
    scale = 2.0**-12  # keeps sums within float16
    bias = torch.randn(outputs).to(dtype)
    for name in kernels_of(dtype):
        layer = Int8Linear(weight, bias, KernelTable.of(name))
        for rows in ROWS:
            x = torch.randint(-127, 128, (rows, inputs)).to(dtype) * scale
            x[:, ::32] = -127 * scale
            residual = torch.randn(rows, outputs).to(dtype)
            wanted = linear(x.double(), weight.double(), bias.double())
            close = {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
            for actual, expected in (
                (layer(x), wanted),
                (layer.add_to(residual, x), wanted + residual),
            ):
                torch.testing.assert_close(actual.double(), expected, **close, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_large_input_costs_its_group_alone(dtype) -> None:
    """Outputs of 128 inputs that stand beside one of 100 times their size, which has no weight."""
    weight, x = torch.randn(64, 256).to(dtype), torch.randn(5, 256).to(dtype)
    weight[:, 0], x[:, 0] = 0, 100
    weight[:, 1:128] = 0
    actual = Int8Linear(weight, None, choose_kernels(Weights.quantized("int8", dtype)))(x)
    expected = linear(x.double(), weight.double())
    assert float((actual - expected).norm() / expected.norm()) < 0.02


def test_it_is_close_for_any_numbers() -> None:
    weight, x = torch.randn(300, 200) * 0.02, torch.randn(9, 200)
    x[3] = 0
    wanted = linear(x, weight)
    layer = Int8Linear(weight)
    actual = layer(x)
    assert float((actual - wanted).norm() / wanted.norm()) < 0.02
    assert actual[3].abs().max() == 0
    assert float((layer.unpacked().weight - weight).norm() / weight.norm()) < 0.02
