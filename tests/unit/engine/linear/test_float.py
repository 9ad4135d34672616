"""Linear layers with float32 and bfloat16 weights against those of torch."""

import pytest
import torch
from torch import nn

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.float import Bf16Linear, PackedLinear

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
