"""Norms of models of `transformers` in the CPU's kernels."""

import pytest
import torch
from torch import nn
from transformers.models.bamba.modeling_bamba import BambaRMSNorm, BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNorm, KimiLinearRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from tgi_server.engine.backends.norms import install_norm_kernels
from tgi_server.engine.kernels import load_kernels

SIZE = 48
NORMS = {
    "weight behind the rounding": lambda: BambaRMSNorm(SIZE),
    "one added to the weight": lambda: Qwen3NextRMSNorm(SIZE),
    "rounded once": lambda: KimiLinearRMSNorm(SIZE),
    "gate behind the norm": lambda: Qwen3NextRMSNormGated(SIZE),
    "gate before the norm, in groups": lambda: BambaRMSNormGated(SIZE, SIZE // 2),
    "gate behind the norm, in groups": lambda: FalconH1RMSNormGated(SIZE, n_groups=2, norm_before_gate=True),
    "sigmoid": lambda: KimiLinearRMSNormGated(SIZE),
}


class WeirdRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
@torch.inference_mode()
def test_a_norm_in_a_kernel_is_the_one_of_the_model(name: str, dtype: torch.dtype) -> None:
    assert load_kernels()
    torch.manual_seed(0)
    model = nn.Sequential(NORMS[name]()).to(dtype)
    model[0].weight.add_(torch.randn(SIZE))
    inputs = [3 * torch.randn(1, 5, SIZE, dtype=dtype) for _ in range(2 if "Gated" in type(model[0]).__name__ else 1)]
    expected = model[0](*inputs)
    install_norm_kernels(model)
    assert "forward" in vars(model[0])
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(model[0](*inputs), expected, **close)
    heads = [each.expand(4, 5, SIZE).transpose(0, 1) for each in inputs]
    torch.testing.assert_close(model[0](*heads), expected[0].unsqueeze(1).expand(5, 4, SIZE), **close)


def test_a_norm_of_another_formula_is_left_alone() -> None:
    assert load_kernels()
    model = nn.Sequential(WeirdRMSNorm(), nn.RMSNorm(SIZE))
    install_norm_kernels(model)
    assert not any("forward" in vars(module) for module in model)
