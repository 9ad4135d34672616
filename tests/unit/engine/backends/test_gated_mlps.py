"""Feed-forward parts of models of `transformers` in one call of the CPU's kernels."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1MLP
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5MLP

from tgi_server.engine.backends.build import pack_linears
from tgi_server.engine.backends.gated_mlps import install_gated_mlp_kernels
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear import linear_factory

SIZES = {"hidden_size": 48, "intermediate_size": 43}


def packed(name: str, dtype: torch.dtype) -> torch.nn.Module:
    assert load_kernels()
    torch.manual_seed(0)
    made = {
        "qwen": lambda: Qwen3_5MLP(AutoConfig.for_model("qwen3_5_text", **SIZES), SIZES["intermediate_size"]),
        "lfm2": lambda: Lfm2MLP(AutoConfig.for_model("lfm2", block_auto_adjust_ff_dim=False, **SIZES)),
        "multipliers": lambda: FalconH1MLP(AutoConfig.for_model("falcon_h1", mlp_multipliers=[1.02, 0.99], **SIZES)),
    }
    model = torch.nn.Sequential(made[name]()).to(dtype).requires_grad_(False)
    pack_linears(model, linear_factory(model, dtype, None))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen", "lfm2"])
def test_the_kernel_computes_what_the_module_does(name: str, dtype: torch.dtype) -> None:
    model, x = packed(name, dtype), torch.randn(1, 5, 48, dtype=dtype)
    expected = model(x)
    install_gated_mlp_kernels(model, dtype)
    assert "forward" in vars(model[0])
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    torch.testing.assert_close(model(x), expected, **close)
    assert torch.equal(model(x)[:, 2:3], model(x[:, 2:3]))


def test_what_adapters_add_to_a_layer_is_computed() -> None:
    model, x = packed("qwen", torch.float32), torch.randn(1, 5, 48)
    install_gated_mlp_kernels(model, torch.float32)
    plain = model(x)

    def add(_: torch.nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + 1

    hook = model[0].up_proj.register_forward_hook(add)
    assert not torch.allclose(model(x), plain)
    hook.remove()
    assert torch.equal(model(x), plain)


def test_a_module_of_another_formula_is_left_alone() -> None:
    model = packed("multipliers", torch.bfloat16)
    install_gated_mlp_kernels(model, torch.bfloat16)
    assert "forward" not in vars(model[0])
