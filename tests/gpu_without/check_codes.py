"""Linear layers with codes by their kernels for GPUs, in the interpreter, against the weights made dense."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import linear

from tests.gguf_models import make_wide
from tests.gpu_without.check_kernels import products_of_bfloat16  # noqa: F401
from tests.gpu_without.check_layers import as_on_a_gpu  # noqa: F401
from tests.quantized_models import make_quantized
from tests.unit.engine.checkpoint.quantized.test_gguf import described
from tests.unit.engine.linear.test_quantized import KINDS, random_weight
from tests.unit.engine.probed import probed
from tgi_server.engine import EngineConfig
from tgi_server.engine.backends.cuda import CudaBackend
from tgi_server.engine.backends.cuda_model import CudaModel
from tgi_server.engine.backends.probe import LogitsProbe
from tgi_server.engine.checkpoint.load_model import load_model
from tgi_server.engine.checkpoint.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedWeight
from tgi_server.engine.checkpoint.quantized.weight import paired
from tgi_server.engine.kernels.triton import norm_and_gate, rounding
from tgi_server.engine.kernels.triton.rounding import rounded, rounded_norm
from tgi_server.engine.linear import gpu
from tgi_server.engine.linear.gpu import Findings, fault_of, gpu_linear_factory
from tgi_server.engine.linear.scaled import ScaledLinear
from tgi_server.engine.linear.triton_quantized import TritonLinear
from tgi_server.engine.models.families import family_of, spec_of

ERROR = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Of 4 bits, as the microscaling formats have them: 2 bits of exponent and 1 of mantissa.
MXFP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CPU = torch.device("cpu")


def check(layer: Any, dense: torch.Tensor, bias: torch.Tensor | None, rows: int, dtype: torch.dtype) -> None:
    nothing = layer(torch.empty(0, layer.in_features, dtype=dtype))
    assert (nothing.shape, nothing.dtype) == ((0, layer.out_features), dtype)
    x, residual = torch.randn(rows, layer.in_features).to(dtype), torch.randn(rows, layer.out_features).to(dtype)
    wanted = linear(x.double(), dense.double(), None if bias is None else bias.double())
    for actual, expected in (
        (layer(x), wanted),
        (layer(x[None])[0], wanted),
        (layer.add_to(residual, x), wanted + residual),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=ERROR[dtype], atol=ERROR[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 70])
def test_every_kind_of_codes_for_few_rows_and_many(kind: str, rows: int) -> None:
    weight, bias = random_weight(kind, 96, 80), torch.randn(80)
    layer = TritonLinear(weight, bias)
    assert layer.block == 32
    check(layer, weight.dense(), bias, rows, torch.float32)
    assert torch.equal(layer.unpacked().weight, weight.dense())
    outputs = torch.tensor([79, 0, 3, 3])
    assert torch.equal(layer.rows(outputs, torch.float32), weight.dense()[outputs])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int4", "codebook", "int8 with offsets", "fp8"])
def test_inputs_of_16_bits(kind: str, dtype: torch.dtype) -> None:
    weight = random_weight(kind, 256, 70, torch.arange(256) // 128)
    layer = TritonLinear(weight, dtype=dtype)
    assert layer.block == (128 if kind in ("int4", "codebook") else 64)
    for rows in (3, 33, 130):
        check(layer, weight.dense(), None, rows, dtype)


@pytest.mark.parametrize("size", [32, 64, 128, 300])
@pytest.mark.parametrize("inputs", [256, 300])
def test_groups_of_all_sizes(size: int, inputs: int) -> None:
    weight = random_weight("int4", inputs, 40, torch.arange(inputs) // size)
    layer = TritonLinear(weight)
    assert layer.block == (32 if size == 32 else 64 if size == 64 or inputs == 300 else 128)
    check(layer, weight.dense(), None, 3, torch.float32)


@pytest.mark.parametrize("kind", ["int4", "codebook", "int8 with offsets", "fp8"])
@pytest.mark.parametrize("missing", [None, 1], ids=["all groups", "a group without inputs"])
def test_groups_may_have_any_inputs_in_any_order(kind: str, missing: int | None) -> None:
    groups = torch.randint(0, 4, (77,), generator=torch.Generator().manual_seed(0))
    groups = torch.where(groups == missing, 0, groups) if missing is not None else groups
    weight = random_weight(kind, 77, 50, groups)
    layer = TritonLinear(weight)
    check(layer, weight.dense(), None, 3, torch.float32)
    assert torch.equal(layer.unpacked().weight, weight.dense())
    assert torch.equal(layer.rows(torch.tensor([49, 7]), torch.float32), weight.dense()[[49, 7]])


def test_mxfp4() -> None:
    scales = torch.randint(-5, 3, (24, 3)).float().exp2()
    codes = torch.randint(0, 16, (24, 96), dtype=torch.uint8)
    weight = QuantizedWeight.of(paired(codes), scales, codebook=MXFP4)
    check(TritonLinear(weight), weight.dense(), None, 5, torch.float32)


def test_rows_that_do_not_follow_each_other() -> None:
    weight, x = random_weight("int4", 64, 20), torch.randn(6, 2, 64)
    torch.testing.assert_close(TritonLinear(weight)(x[:, 1]), linear(x[:, 1], weight.dense()), rtol=1e-5, atol=1e-5)
    layer, across = TritonLinear(weight), torch.randn(64, 6).T
    torch.testing.assert_close(layer(across), linear(across, weight.dense()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at_once", [rounding._AT_ONCE, 1024])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_rounded_to_fp8(dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (torch.randn(5, 1500) * torch.tensor([[1e-4], [1.0], [50.0], [1e5], [0.0]])).to(dtype)
    monkeypatch.setattr(rounding, "_AT_ONCE", at_once)
    codes, scales = rounded(x)
    wanted = x.float().abs().amax(1, keepdim=True).clamp(min=448e-30) / 448
    torch.testing.assert_close(scales, wanted)
    assert torch.equal(codes.float(), (x.float() / scales).to(torch.float8_e4m3fn).float())
    codes, scales = rounded(x, 300, least_rows=8)
    assert (codes.shape, scales.shape, scales.stride()) == ((8, 1500), (8, 5), (1, 8))
    codes, scales = codes[:5], scales[:5]
    by_group = x.float().unflatten(1, (5, 300))
    torch.testing.assert_close(scales, by_group.abs().amax(2).clamp(min=448e-30) / 448)
    wanted = (by_group / scales.unsqueeze(2)).to(torch.float8_e4m3fn)
    assert torch.equal(codes.float(), wanted.float().flatten(1))


@pytest.mark.parametrize("together", [None, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_or_the_gate_before_is_rounded_as_alone(
    dtype: torch.dtype, together: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the same bits, also of rows that are rounded in parts."""
    x, added = torch.randn(5, 768).to(dtype), torch.randn(5, 768).to(dtype)
    weight, bias = (1 + torch.randn(2, 768) / 4).to(dtype)
    for other, shift in ((None, None), (added, None), (None, bias), (added, bias)):
        (codes, scales), total = rounded_norm(x, other, weight, shift, 1e-5, together, least_rows=16)
        close = 2 * torch.finfo(dtype).eps  # the interpreter cuts bfloat16 off
        torch.testing.assert_close(total, x if other is None else x + other, rtol=close, atol=close)
        normed = norm_and_gate.rms_norm(total, weight, 1e-5)
        if shift is not None:
            normed = norm_and_gate.layer_norm(total, weight, shift, 1e-5)
        known, known_scales = rounded(normed, together, least_rows=16)
        assert (codes.shape, scales.shape, scales.stride()) == (known.shape, known_scales.shape, known_scales.stride())
        assert torch.equal(codes[:5].view(torch.uint8), known[:5].view(torch.uint8))
        assert torch.equal(scales[:5], known_scales[:5])
    monkeypatch.setattr(rounding, "_AT_ONCE", 256)
    for activation, gated in (("silu", True), ("gelu_tanh", True), ("relu", False)):
        codes, scales = rounded(x, together, 1, activation, gated=gated)
        known, known_scales = rounded(norm_and_gate.activate(x, activation, gated=gated), together)
        assert torch.equal(codes.view(torch.uint8), known.view(torch.uint8))
        assert torch.equal(scales, known_scales)


_scaled_mm = torch._scaled_mm


def scaled_mm(x, weight, scale_x, scale_weight, bias, out_dtype, use_fast_accum):
    """The product of torch, which CPUs do not have."""
    assert x.dtype == weight.dtype == torch.float8_e4m3fn
    assert (x.is_contiguous(), weight.t().is_contiguous()) == (True, True)
    with FakeTensorMode():  # in which torch checks what it would check on a GPU
        there = [
            None if each is None else torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="cuda")
            for each in (x, weight, scale_x, scale_weight, bias)
        ]
        _scaled_mm(*there, out_dtype=out_dtype, use_fast_accum=use_fast_accum)
    groups, scale_weight = scale_x.shape[1], scale_weight.contiguous()
    if groups == 1:
        assert scale_x.stride(1) == scale_weight.stride(1) == 1
    else:  # what cuBLAS asks for, and torch without a GPU does not check
        assert (bias, use_fast_accum, scale_x.stride(), x.shape[1]) == (None, False, (1, len(x)), 128 * groups)
    size = x.shape[1] // groups
    parts = zip(x.float().split(size, 1), weight.float().split(size), scale_x.split(1, 1), scale_weight, strict=True)
    y = sum(own @ of_weight * scale * of_outputs for own, of_weight, scale, of_outputs in parts)
    return (y if bias is None else y + bias).to(out_dtype)


@pytest.mark.parametrize("groups", [1, 3])
def test_a_layer_of_fp8(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    weight = random_weight("fp8", 384, 48, torch.arange(384) // (384 // groups))
    bias = torch.randn(48).bfloat16()
    layer = ScaledLinear(weight, bias, None, torch.bfloat16)
    x, residual = torch.randn(2, 3, 384).bfloat16(), torch.randn(2, 3, 48).bfloat16()
    wanted = linear(x.float(), weight.dense(), bias.float())
    for actual, expected in (
        (layer(x), wanted),
        (layer.add_to(residual, x), wanted + residual),
    ):
        assert actual.dtype is torch.bfloat16
        assert (actual.float() - expected).norm() < 0.05 * expected.norm()
    torch.testing.assert_close(layer.unpacked().weight, weight.dense(torch.bfloat16))
    assert layer(torch.empty(0, 384).bfloat16()).shape == (0, 48)


def layer_of(weight: QuantizedWeight) -> QuantizedLinear:
    module = QuantizedLinear(nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta"))
    module.fill(weight)
    return module


def quantized(layout: str, folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    path, _ = make_quantized(layout, folder, architecture)
    return load_model(EngineConfig(path, device=CPU, dtype=dtype, custom_kernels=False), CPU)


@pytest.mark.parametrize(
    ("layout", "architecture", "dtype", "kernels"),
    [
        ("gptq_act_order", "llama", torch.float32, "triton (int4), torch"),
        ("gptq_one_group", "opt", torch.float32, "triton (int4), torch"),
        ("nf4", "llama", torch.bfloat16, "triton (codebook), torch"),
        ("w8a8", "qwen3", torch.float32, "triton (int8), torch"),
        ("fp8_blocks", "qwen3_moe", torch.float32, "triton (fp8), torch"),
        ("fp8_rows", "llama", torch.bfloat16, "scaled_mm (fp8), torch"),
    ],
)
def test_models_are_computed_by_the_kernels(
    layout: str,
    architecture: str,
    dtype: torch.dtype,
    kernels: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    model = quantized(layout, tmp_path, architecture, dtype)
    generic, _ = probed(quantized(layout, tmp_path / "again", architecture, dtype))
    before = LogitsProbe(generic, long=True)
    backend = CudaBackend(model, EngineConfig(Path("/nowhere")))
    proved = backend.create_model(family_of(model.config), spec_of(model.config))
    assert (backend.fallbacks, backend.linear_kernels) == ([], kernels)
    assert isinstance(proved, CudaModel)
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    assert before.fault(proved, "the kernels", backend._linear.rounding) is None


def test_an_embedding_is_looked_up_in_the_tied_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    file, _ = make_wide("llama", tmp_path, "Q4_K", tie_word_embeddings=True)
    config = EngineConfig(described(file), device=CPU, dtype=torch.float32, custom_kernels=False)
    model = load_model(config, CPU)
    before = LogitsProbe(probed(load_model(config, CPU))[0], long=True)
    backend = CudaBackend(model, config)
    proved = backend.create_model(family_of(model.config), spec_of(model.config))
    assert (backend.fallbacks, backend.linear_kernels) == ([], "triton (int4), torch")
    embedding = proved.decoder.embedding
    assert isinstance(embedding, QuantizedEmbedding)
    assert isinstance(embedding.layer, TritonLinear)
    assert not any(isinstance(module, QuantizedLinear) for module in (*model.modules(), *embedding.modules()))
    assert before.fault(proved, "the kernels", backend._linear.rounding) is None


def test_a_kernel_that_is_wrong_or_fails_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))

    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(torch, "_scaled_mm", fails)
    model = quantized("fp8_rows", tmp_path, "llama", torch.bfloat16)
    linears, (reason,) = gpu_linear_factory(model, model.dtype)
    assert str(linears) == "triton (fp8), torch"
    assert "scaled_mm fails (RuntimeError: no such instruction)" in reason
    monkeypatch.setattr(TritonLinear, "forward", lambda layer, x: x.new_zeros(len(x), layer.out_features))
    linears, reasons = gpu_linear_factory(model, model.dtype)
    assert str(linears) == "torch"
    assert "triton is off by 1" in reasons[1]
    backend = CudaBackend(model, EngineConfig(Path("/nowhere")))
    backend.create_model(family_of(model.config), spec_of(model.config))
    assert backend.fallbacks[: len(reasons)] == reasons
    assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14


def test_what_drafts_for_a_model_tries_no_kernel_again_and_reports_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    tried: list[tuple[str, int]] = []

    def fault_of(weights: Any, name: str, *_: Any) -> str | None:
        tried.extend((name, weight.shape[1]) for weight in weights)
        return next((f"{name} is wrong" for weight in weights if weight.shape[1] == 112), None)

    monkeypatch.setattr(gpu, "fault_of", fault_of)
    model, found = quantized("fp8_rows", tmp_path, "llama", torch.bfloat16), Findings()
    linears, fallbacks = gpu_linear_factory(model, model.dtype, None, found)
    assert str(linears) == "triton (fp8), torch"
    first = list(tried)
    assert first
    gpu_linear_factory(model, model.dtype, None, found)
    assert tried == first
    drafter = nn.Sequential(layer_of(random_weight("fp8", 32, 112, torch.zeros(112, dtype=torch.int64))))
    linears, fallbacks = gpu_linear_factory(drafter, model.dtype, None, found)
    assert tried[len(first) :] == [("triton", 112)]
    assert (str(linears), found.fallbacks) == ("torch", fallbacks)
    assert ["triton is wrong" in fallback for fallback in fallbacks] == [True]


def test_scaled_mm_is_for_chips_that_have_it_and_a_scale_for_each_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "fault_of", lambda *_: None)
    for layout, dtype, capability, kernels in (
        ("fp8_rows", torch.bfloat16, (8, 9), "scaled_mm (fp8), torch"),
        ("fp8_rows", torch.bfloat16, (8, 6), "triton (fp8), torch"),
        ("fp8_rows", torch.float16, (9, 0), "triton (fp8), torch"),
        ("fp8_blocks", torch.bfloat16, (9, 0), "triton (fp8), torch"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, known=capability: known)
        model = quantized(layout, tmp_path / f"{layout}{capability}", "llama", torch.bfloat16)
        assert str(gpu_linear_factory(model, dtype)[0]) == kernels
    in_blocks = layer_of(random_weight("fp8", 256, 128, torch.arange(256) // 128))
    for capability, fits in (((8, 9), False), ((9, 0), True), ((10, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, known=capability: known)
        assert gpu._has_scaled_mm(in_blocks, torch.bfloat16) is fits


def test_what_is_compared_has_a_tolerance_for_rounding_only() -> None:
    weight = random_weight("int4", 64, 48)
    assert fault_of([weight], gpu.TRITON, torch.bfloat16) is None
    nothing = QuantizedWeight.of(torch.zeros(8, 32).to(torch.int8), torch.zeros(8, 1))
    assert fault_of([nothing], gpu.TRITON, torch.float32) is None
