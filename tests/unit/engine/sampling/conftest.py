"""Samplers of both kinds."""

from collections.abc import Callable

import pytest
import torch

from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.sampling import CpuSampler, Sampler, TorchSampler, WatermarkSettings

New = Callable[..., Sampler]  # takes rows, tokens of the vocabulary, and WatermarkSettings
CPU = torch.device("cpu")


def new_torch_sampler(rows: int, vocab: int, watermark: WatermarkSettings | None = None) -> Sampler:
    return TorchSampler(rows, vocab, CPU, watermark)


@pytest.fixture(scope="package", params=[CpuSampler, new_torch_sampler], ids=["kernel", "torch"])
def new(request: pytest.FixtureRequest) -> New:
    if request.param is CpuSampler and not load_kernels():
        pytest.skip("the kernels cannot be compiled here")
    return request.param
