"""A norm's formula, found on the module of `transformers`."""

import pytest
import torch
from torch import Tensor, nn

from tests.tiny_models import build
from tgi_server.engine.backends.build import layers_of
from tgi_server.engine.backends.decoder import Norm, Unfit
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.models.families import spec_of


@pytest.mark.parametrize("architecture", ["cohere", "gemma", "helium", "llama", "nemotron", "olmo2", "opt"])
def test_a_norm_in_16_bits_rounds_where_that_of_transformers_does(architecture: str) -> None:
    model = build(architecture).bfloat16()
    spec = spec_of(model.config)
    name = spec.layers[0].attention_norm or spec.layers[0].attended_norm
    assert name is not None
    module = layers_of(model, spec)[0].get_submodule(name)
    norm, x = Norm.of(module), torch.randn(99, model.config.hidden_size).bfloat16()
    with torch.inference_mode():
        expected = module(x)
    ways = [norm(x)]
    if load_kernels():
        ops = torch.ops.oatmill
        layer = ops.layer_norm(x, norm.weight, norm.bias, norm.eps) if norm.centred else None
        ways.append(ops.rms_norm(x, norm.weight, norm.eps) if layer is None else layer)
    for actual in ways:
        assert (actual == expected).float().mean() > 0.99


def test_a_norm_of_another_formula_does_not_fit() -> None:
    class Norm2(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.5

    with pytest.raises(Unfit, match="the formula of Norm2 is not known"):
        Norm.of(Norm2(16))
