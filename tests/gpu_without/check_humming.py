"""Weights of 4 bits by `humming-kernels`, which needs a GPU: its layer is replaced by one with the same signatures."""

import inspect
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from humming import tune
from humming.config import LayerConfig
from humming.device import DeviceInfo
from humming.layer import HummingLayer
from humming.schema import HummingWeightSchema
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.gpu_without.check_kernels import products_of_bfloat16  # noqa: F401
from tests.unit.engine.linear.test_quantized import random_weight
from tgi_server.engine.checkpoint.quantized import QuantizedLinear, QuantizedWeight
from tgi_server.engine.linear import humming
from tgi_server.engine.linear.gpu import gpu_linear_factory
from tgi_server.engine.linear.humming import HummingLinear, takes
from tgi_server.engine.linear.triton_quantized import TritonLinear


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
        self.humming_config = object()
        self.weight = ((codes - zeros) * scales.repeat_interleave(repeats, 1)).to(self.dtype)

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        given = inspect.signature(HummingLayer.forward).bind(self, *arguments, **named).arguments
        x = given["inputs"]
        assert len(x)
        kernels = [config for after, last, config in json.loads(given["tuning_config"]) if after < len(x) <= last]
        assert len(kernels) == 1
        assert kernels[0]["rows"] >= len(x) or kernels[0]["rows"] == max(humming.ROW_CLASSES)
        assert x.dtype == self.dtype
        return linear(x, self.weight, self.tensors.get("bias"))


def unpacked(words: Tensor) -> Tensor:
    """Returns the codes of words, the first in the low bits: [rows, 8 * words]."""
    return torch.stack([words >> shift & 15 for shift in range(0, 32, 4)], -1).flatten(1)


@pytest.fixture(autouse=True)
def fake_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "humming.layer", SimpleNamespace(HummingLayer=FakeLayer))
    monkeypatch.setattr(tune, "get_heuristics_config", lambda layer, shape_m, device: {"rows": shape_m})
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
    assert layer(x[:0]).shape == (0, 3, 128)
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


def test_every_joined_shape_is_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    proved: list[tuple[tuple[int, ...], int]] = []
    forward = FakeLayer.forward

    def noted(layer: FakeLayer, x: Tensor, **named: Any) -> Tensor:
        proved.append((layer.sizes, len(x)))
        return forward(layer, x, **named)

    monkeypatch.setattr(FakeLayer, "forward", noted)
    model = nn.Sequential(*(layer_of(integers(8.0)) for _ in range(4)))
    factory, fallbacks = gpu_linear_factory(model, torch.bfloat16)
    assert (str(factory), fallbacks, proved) == ("humming (int4), torch", [], [])
    for _ in range(2):
        assert isinstance(factory(model[0]), HummingLinear)
        assert isinstance(factory.joined(*model), HummingLinear)
    assert [sizes for sizes, _ in proved] == [(128, 256)] * 7 + [(512, 256)] * 7
    assert [rows for _, rows in proved[:7]] == [1, 9, 17, 33, 65, 129, 257]
    assert fallbacks == []


def test_a_shape_that_is_wrong_is_computed_by_the_engine_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = FakeLayer.forward

    def wrong(layer: FakeLayer, x: Tensor, **named: Any) -> Tensor:
        return forward(layer, x, **named) * (1 if layer.sizes[0] == 128 or len(x) < 257 else 2)

    monkeypatch.setattr(FakeLayer, "forward", wrong)
    model = nn.Sequential(*(layer_of(integers(8.0)) for _ in range(2)))
    factory, fallbacks = gpu_linear_factory(model, torch.bfloat16)
    assert isinstance(factory(model[0]), HummingLinear)
    joined = factory.joined(*model)
    assert isinstance(joined, TritonLinear)
    assert ["shape (256, 256)" in fault and "for 257 rows" in fault for fault in fallbacks] == [True]
    monkeypatch.setattr(FakeLayer, "transform", lambda layer: layer.missing)
    factory, fallbacks = gpu_linear_factory(model, torch.bfloat16)
    assert isinstance(factory(model[0]), TritonLinear)
    assert "humming fails (AttributeError" in fallbacks[0]


@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)])
def test_the_library_has_few_kernels_to_compile(outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes of Llama 3.1 8B, by the library's own choice for an H200."""
    monkeypatch.undo()
    h200 = SimpleNamespace(
        sm_version=90, is_ppu=False, name="NVIDIA H200", sm_count=132, memory_bandwidth_gbps=4800, sm_major=9,
        sm_minor=0, tensorcore_tops={"float16": 989, "bfloat16": 989}, max_smem_size=232448, l2_cache_size=50 << 20,
        max_registers_per_sm=65536,
    )  # fmt: skip
    monkeypatch.setattr(DeviceInfo, "_get_value", lambda info: h200)
    monkeypatch.setitem(DeviceInfo._instances, 0, DeviceInfo(-1))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    layer_config = LayerConfig(
        shape_n=outputs, shape_k=inputs, a_dtype="bfloat16", b_dtype="uint4", c_dtype="bfloat16", bs_dtype="bfloat16",
        weight_scale_group_size=128,
    )  # fmt: skip
    kernels = json.loads(humming._kernels_by_rows(layer_config, torch.device("cuda", 0)))
    assert [(after, last) for after, last, _ in kernels] == list(pairwise((0, 8, 16, 32, 64, 128, 256, 1 << 30)))
    own = tune.get_heuristics_config(layer_config, device=torch.device("cuda", 0))
    assert {json.dumps(config) for *_, config in kernels} <= {json.dumps(config) for *_, config in own}
    assert len({json.dumps(config) for *_, config in own}) > 20
