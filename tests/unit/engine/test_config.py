"""The dtype that an engine computes in."""

import pytest
import torch

from tgi_server.engine.config import has_native_bfloat16, resolve_dtype
from tgi_server.engine.errors import UnsupportedModel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FAST_ON_CPU = torch.bfloat16 if has_native_bfloat16() else torch.float32


@pytest.mark.parametrize(
    ("requested", "checkpoint", "device", "expected"),
    [
        (torch.bfloat16, torch.float32, CPU, torch.bfloat16),
        (torch.float16, torch.float32, CUDA, torch.float16),
        (None, torch.float32, CPU, torch.float32),
        (None, None, CPU, torch.float32),
        (None, torch.float16, CPU, FAST_ON_CPU),
        (None, torch.bfloat16, CPU, FAST_ON_CPU),
        (None, torch.float16, CUDA, torch.float16),
        (None, torch.float64, CUDA, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_requested_one_or_one_that_the_device_is_fast_at(
    requested, checkpoint, device, expected
) -> None:
    assert resolve_dtype(requested, checkpoint, device) is expected


def test_float16_on_a_cpu_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="dtype float16 is not supported on a CPU; use --dtype bfloat16"):
        resolve_dtype(torch.float16, torch.float16, CPU)
