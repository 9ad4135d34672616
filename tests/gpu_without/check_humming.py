"""Weights of 4 bits by `humming-kernels`, which needs a GPU: its layer is replaced by one with the same signatures."""

import inspect
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from humming.layer import HummingLayer
from humming.schema import HummingWeightSchema
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.gpu_without.check_kernels import products_of_bfloat16  # noqa: F401
from tests.unit.engine.linear.test_quantized import random_weight
from tgi_server.engine.checkpoint.quantized import QuantizedLinear, QuantizedWeight
from tgi_server.engine.linear import gpu, humming
from tgi_server.engine.linear.gpu import gpu_linear_factory
from tgi_server.engine.linear.humming import HummingLinear, takes


class FakeLayer(nn.Module):
    """Takes what the library's layer takes, and checks the tensors against the library's own schema."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__()
        given = inspect.signature(HummingLayer.__init__).bind(self, *arguments, **named).arguments
        self.sizes, self.dtype = (given["shape_n"], given["shape_k"]), given["torch_dtype"]
        self.schema = HummingWeightSchema.from_config({"quant_method": "humming", **given["weight_config"]})
        self.has_bias = given["has_bias"]

    def load_from_tensors(self, *arguments: Any, **named: Any) -> None:
        given = inspect.signature(HummingLayer.load_from_tensors).bind(self, *arguments, **named).arguments
        self.tensors = given["tensors"]
        wanted = self.schema.get_tensors_attrs(*self.sizes, param_dtype=self.dtype, has_bias=self.has_bias)
        actual = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}
        assert actual == {name: (tuple(each["shape"]), each["dtype"]) for name, each in wanted.items()}

    def transform(self) -> None:
        inspect.signature(HummingLayer.transform).bind(self)
        codes = unpacked(self.tensors["weight"]).float()
        zeros = torch.tensor([[8]])
        if self.schema.has_zero_point:
            zeros = unpacked(self.tensors["zero_point"].T).T
        scales = self.tensors["weight_scale"].float()
        self.groups = scales.shape[1]
        repeats = self.sizes[1] // self.groups
        zeros = zeros.expand(len(codes), self.groups).repeat_interleave(repeats, 1)
        self.weight = ((codes - zeros) * scales.repeat_interleave(repeats, 1)).to(self.dtype)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        x = inspect.signature(HummingLayer.forward).bind(self, *arguments, **named).arguments["inputs"]
        assert x.dtype == self.dtype
        return linear(x, self.weight, self.tensors.get("bias"))


def unpacked(words: Tensor) -> Tensor:
    """Returns the codes of words, the first in the low bits: [rows, 8 * words]."""
    return torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1)


@pytest.fixture(autouse=True)
def fake_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=FakeLayer))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def integers(zeros: float | None, size: int = 128) -> QuantizedWeight:
    """Returns a weight of 128 outputs and 256 inputs, with these zero points, or 3.0: any."""
    weight = random_weight("int4", 256, 128, torch.arange(256) // size)
    any_zeros = torch.randint(0, 16, weight.scales.shape).float()
    return replace(weight, zeros={None: None, 8.0: torch.full_like(any_zeros, 8.0)}.get(zeros, any_zeros))


@pytest.mark.parametrize("zeros", [None, 8.0, 3.0], ids=["no zeros", "eights", "any zeros"])
@pytest.mark.parametrize("size", [64, 256], ids=["groups", "one group"])
def test_a_layer_is_the_dense_one(zeros: float | None, size: int) -> None:
    weight, bias = integers(zeros, size=size), torch.randn(128)
    layer = HummingLinear(weight, bias, None, torch.bfloat16)
    x, residual = torch.randn(2, 3, 256).bfloat16(), torch.randn(2, 3, 128).bfloat16()
    wanted = linear(x.float(), weight.dense(), bias)
    for actual, expected in (
        (layer(x), wanted),
        (layer.add_to(residual, x), wanted + residual),
    ):
        assert actual.dtype is torch.bfloat16
        assert (actual.float() - expected).norm() < 0.02 * expected.norm()
    dense = HummingLinear(weight, None, None, torch.bfloat16).unpacked().weight
    torch.testing.assert_close(dense.float(), weight.dense(), rtol=0.02, atol=0.02)


def layer_of(weight: QuantizedWeight) -> QuantizedLinear:
    module = QuantizedLinear(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
    module.fill(weight)
    return module


def test_what_the_library_does_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = integers(8.0)
    assert takes(layer_of(fits), torch.bfloat16)
    assert not takes(layer_of(fits), torch.float32)
    assert not takes(layer_of(replace(fits, groups=fits.groups.flip(0))), torch.bfloat16)
    assert not takes(layer_of(replace(fits, zeros=torch.full_like(fits.scales, 7.5))), torch.bfloat16)
    assert not takes(layer_of(random_weight("int4 without zeros", 256, 120)), torch.bfloat16)
    monkeypatch.setattr(humming, "find_spec", lambda name: None)
    assert not takes(layer_of(fits), torch.bfloat16)


def test_it_is_proved_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_ROWS", (2,))
    model = nn.Sequential(layer_of(integers(8.0)))
    factory, fallbacks = gpu_linear_factory(model, torch.bfloat16)
    assert (str(factory), fallbacks) == ("humming (int4), torch", [])
    monkeypatch.setattr(FakeLayer, "transform", lambda layer: layer.missing)
    factory, (fault,) = gpu_linear_factory(model, torch.bfloat16)
    assert "humming fails (AttributeError" in fault
