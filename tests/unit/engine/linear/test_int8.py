"""Linear layers with 8-bit weights against torch in float64, by every kernel of this CPU."""

import pytest
import torch
from torch.nn.functional import linear

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.int8 import Int8Linear
from tgi_server.engine.linear.kernel_table import KernelTable

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [*range(1, 18), 31, 32, 33, 64, 100, 300]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


def kernels_of(inputs: int) -> list[str]:
    packed = torch.ops.oatmill.linear_pack(torch.zeros(1, inputs, dtype=torch.int8))
    return torch.ops.oatmill.linear_kernels(packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (50, 131), (1088, 70)])
def test_every_kernel_is_exact_for_what_8_bits_can_hold(dtype, inputs, outputs) -> None:
    # Whole numbers up to 127 that reach it in every row are rounded by nobody.
    weight = torch.randint(-127, 128, (outputs, inputs)).to(dtype)
    weight[:, 0] = 127
    scale = 2.0**-12  # keeps sums within float16
    bias = torch.randn(outputs).to(dtype)
    for name in kernels_of(inputs):
        layer = Int8Linear(weight, bias, KernelTable.of(name))
        for rows in ROWS:
            x = torch.randint(-127, 128, (rows, inputs)).to(dtype) * scale
            x[:, 0] = -127 * scale
            residual = torch.randn(rows, outputs).to(dtype)
            wanted = linear(x.double(), weight.double(), bias.double())
            close = {"rtol": 1e-5, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
            for actual, expected in (
                (layer(x), wanted),
                (layer(x, activation="relu"), wanted.relu()),
                (layer.add_to(residual, x), wanted + residual),
            ):
                torch.testing.assert_close(actual.double(), expected, **close, msg=lambda text, n=name: f"{n}: {text}")


def test_it_is_close_for_any_numbers() -> None:
    weight, x = torch.randn(300, 200) * 0.02, torch.randn(9, 200)
    x[3] = 0
    wanted = linear(x, weight)
    layer = Int8Linear(weight)
    actual = layer(x)
    assert float((actual - wanted).norm() / wanted.norm()) < 0.02
    assert actual[3].abs().max() == 0
    assert float((layer.unpacked().weight - weight).norm() / weight.norm()) < 0.02
