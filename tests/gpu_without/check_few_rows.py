"""Products with few rows, with norms, gates and residuals inside, in Triton's interpreter against plain torch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import layer_norm, linear, rms_norm

from tests.gpu_without.check_kernels import products_of_bfloat16  # noqa: F401 (a fixture)
from tests.gpu_without.check_layers import Launches, as_on_a_gpu  # noqa: F401 (a fixture)
from tests.tiny_models import build
from tests.unit.engine.kernels.cpu.ops.test_norm_rope_gate import ACTIVATIONS
from tgi_server.engine import EngineConfig
from tgi_server.engine.backends.cuda import CudaBackend
from tgi_server.engine.backends.cuda_model import CudaModel
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.checkpoint.quantized.rounding import ROUNDINGS
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import triton as kernels
from tgi_server.engine.kernels.triton import few_rows
from tgi_server.engine.linear import gpu
from tgi_server.engine.linear.few_rows import FewRowsLinear, norm_of_inputs
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.scaled import ScaledLinear
from tgi_server.engine.models.families import family_of, spec_of

CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}


@pytest.fixture(autouse=True)
def with_few_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(few_rows, "multiprocessors", lambda device: 4)
    monkeypatch.setenv(kernels.VARIANTS_VARIABLE, "few_rows,attend_in_one,rotary")
    kernels.variants.cache_clear()
    yield
    kernels.variants.cache_clear()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("inputs", [128, 1024, 1100])
@pytest.mark.parametrize("rows", [1, 5, 16])
def test_products(rows: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias, x = torch.randn(90, inputs) / inputs**0.5, torch.randn(90), torch.randn(rows, inputs)
    residual = torch.randn(rows, 90)
    layer = FewRowsLinear(weight.to(dtype), bias.to(dtype))
    x, residual = x.to(dtype), residual.to(dtype)
    wanted = linear(x.float(), weight.to(dtype).float(), bias.to(dtype).float())
    for _ in range(2):  # the first leaves the counters as they were
        torch.testing.assert_close(layer(x).float(), wanted, **CLOSE[dtype])
        torch.testing.assert_close(layer.add_to(residual, x).float(), wanted + residual.float(), **CLOSE[dtype])
    assert not layer._arrived.any()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["silu", "relu", "gelu_tanh"])
@pytest.mark.parametrize(("centred", "inputs"), [(False, 1100), (True, 1100), (True, 128)])
def test_what_stands_around_a_product(
    centred: bool, inputs: int, activation: str, gated: bool, dtype: torch.dtype
) -> None:
    weight, bias, x = torch.randn(180, inputs) / inputs**0.5, torch.randn(180), torch.randn(3, inputs) * 7 + 0.5
    scale, shift = 1 + torch.randn(inputs) / 4, torch.randn(inputs) / 4
    weight, bias, x, scale, shift = (each.to(dtype) for each in (weight, bias, x, scale, shift))
    layer = FewRowsLinear(weight, bias)
    norm = norm_of_inputs(layer, scale, shift if centred else None, 1e-5, centred=centred)
    normed = rms_norm(x.float(), (inputs,), scale.float(), 1e-5)
    if centred:
        normed = layer_norm(x.float(), (inputs,), scale.float(), shift.float(), 1e-5)
    wanted = linear(normed, weight.float(), bias.float())
    if gated:
        gate, up = wanted.chunk(2, 1)
        wanted = ACTIVATIONS[activation](gate) * up
    else:
        wanted = ACTIVATIONS[activation](wanted)
    actual = layer.fused(x, norm=norm, activation=activation, gated=gated)
    torch.testing.assert_close(actual.float(), wanted, **CLOSE[dtype])


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 20, 64])
def test_weights_in_8_bits_take_inputs_as_they_are(rows: int, in_blocks: bool) -> None:
    layer = QuantizedLinear(torch.nn.Linear(1024, 192, bias=False, device="meta"))
    rounded = ROUNDINGS["fp8"][1](torch.randn(192, 1024) / 32)
    if in_blocks:
        scales = rounded.scales * torch.linspace(0.5, 2, 8)
        rounded = replace(rounded, stored_scales=scales, groups=torch.arange(1024) // 128)
    layer.fill(rounded)
    scaled = ScaledLinear(layer.quantized, None, KernelTable.of("scaled_mm"), torch.bfloat16)
    x, residual = torch.randn(rows, 1024).bfloat16(), torch.randn(rows, 192).bfloat16()
    scale = 1 + torch.randn(1024).bfloat16() / 4
    dense = layer.quantized.dense(torch.float32)
    torch.testing.assert_close(scaled(x).float(), x.float() @ dense.T, rtol=2e-2, atol=2e-2)
    wanted = residual.float() + x.float() @ dense.T
    torch.testing.assert_close(scaled.add_to(residual, x).float(), wanted, rtol=2e-2, atol=2e-2)
    norm = norm_of_inputs(scaled, scale, None, 1e-5, centred=False)
    gate, up = (rms_norm(x.float(), (1024,), scale.float(), 1e-5) @ dense.T).chunk(2, 1)
    actual = scaled.fused(x, norm=norm, activation="silu", gated=True)
    torch.testing.assert_close(actual.float(), torch.nn.functional.silu(gate) * up, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "opt", "gpt2", "qwen3"])
def test_models_compute_the_same(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernels for few rows, here up to 64, and for rows that decode."""
    monkeypatch.setattr(gpu, "_dense_layer", lambda *_: FewRowsLinear)
    monkeypatch.setattr(FewRowsLinear, "few_rows", 64)
    model = build(architecture)
    backend = CudaBackend(model, EngineConfig(Path("/nowhere")))
    with Launches(monkeypatch) as launches:
        proved = backend.create_model(family_of(model.config), spec_of(model.config))
    assert isinstance(proved, CudaModel)
    assert backend.fallbacks == []
    assert len(proved._few_rows) == len(proved.decoder.layers)
    assert {"_multiply_few", "_attend_in_one"} <= set(launches.names)
    assert ("_turns" in launches.names) == bool(proved.decoder.ropes)
    assert None not in proved._scalings


def test_a_variant_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.VARIANTS_VARIABLE, "few_rows,fast")
    kernels.variants.cache_clear()
    with pytest.raises(UnsupportedModel, match="OATMILL_GPU_VARIANTS: no fast; there are few_rows"):
        kernels.variants()
