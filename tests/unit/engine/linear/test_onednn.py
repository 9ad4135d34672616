"""Linear layers by oneDNN against those of torch in float32."""

import pytest
import torch
from torch import nn

from tgi_server.engine.linear.onednn import OneDnnLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_weights_of_any_dtype_are_multiplied_on_any_cpu(dtype, rows) -> None:
    first, second = nn.Linear(48, 32), nn.Linear(48, 80, bias=False)
    x, residual = torch.randn(rows, 48), torch.randn(rows, 112)
    wanted = torch.cat([first(x), second(x)], -1)
    layer = OneDnnLinear.joined(first.to(dtype), second.to(dtype))
    x, residual = x.to(dtype), residual.to(dtype)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for actual, expected in (
        (layer(x), wanted),
        (layer.add_to(residual, x), residual + wanted),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected, **close)
    assert layer.unpacked().weight.dtype == dtype
