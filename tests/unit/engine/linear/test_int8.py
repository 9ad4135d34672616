"""Linear layers with 8-bit weights against torch in float64."""

import pytest
import torch
from torch.nn.functional import linear

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.int8 import Int8Linear

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 7, 8, 9, 40, 100]


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    assert load_kernels()
    torch.manual_seed(0)


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
