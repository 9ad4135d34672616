"""The dtype that an engine computes in."""

import pytest
import torch

from tgi_server.engine.backends.devices import has_native_bfloat16, resolve_dtype
from tgi_server.engine.errors import UnsupportedModel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF_ON_CPU = torch.bfloat16 if has_native_bfloat16() else torch.float16


@pytest.mark.parametrize(
    ("requested", "checkpoint", "device", "expected"),
    [
        (torch.bfloat16, torch.float32, CPU, torch.bfloat16),
        (torch.float16, torch.float32, CUDA, torch.float16),
        (None, torch.float32, CPU, torch.float32),
        (None, None, CPU, torch.float32),
        (None, torch.float16, CPU, HALF_ON_CPU),
        (None, torch.bfloat16, CPU, torch.bfloat16),
        (torch.float16, torch.bfloat16, CPU, torch.float16),
        (None, torch.float16, CUDA, torch.float16),
        (None, torch.float64, CUDA, torch.bfloat16),
    ],
)
def test_the_dtype_is_the_requested_one_or_one_that_the_device_is_fast_at(
    requested, checkpoint, device, expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert resolve_dtype(requested, checkpoint, device) is expected


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), torch.float16), ((8, 0), torch.bfloat16)])
def test_gpus_without_bfloat16_compute_in_float16(
    capability: tuple[int, int],
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert resolve_dtype(None, torch.bfloat16, CUDA) is expected
    assert caplog.messages == (
        ["computing in float16: this GPU, of compute capability 7.5, has no bfloat16"] if capability < (8, 0) else []
    )
    assert resolve_dtype(torch.bfloat16, None, CUDA) is torch.bfloat16  # which torch computes slowly
    assert resolve_dtype(None, torch.float32, CUDA) is torch.float32


def test_without_the_cpu_kernels_float16_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="dtype float16 on a CPU needs the CPU kernels; use --dtype bfloat16"):
        resolve_dtype(torch.float16, torch.float16, CPU, custom_kernels=False)


def test_without_the_cpu_kernels_16_bits_are_computed_in_what_torch_is_fast_at() -> None:
    fast = torch.bfloat16 if has_native_bfloat16() else torch.float32
    assert resolve_dtype(None, torch.bfloat16, CPU, custom_kernels=False) is fast
