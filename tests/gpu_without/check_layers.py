"""Decoder layers fused for GPUs, in the interpreter, against those of `transformers`; their kernels are counted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tests.tiny_models import build
from tgi_server.engine.backends import fuse, layer, norm
from tgi_server.engine.backends.attention.cuda import CudaAttention
from tgi_server.engine.backends.layer import DecoderLayer
from tgi_server.engine.kernels.triton import norm_and_gate, paged_attention
from tgi_server.engine.linear import LinearFactory
from tgi_server.engine.linear.blas import BlasLinear
from tgi_server.engine.models.families import spec_of
from tgi_server.engine.runners import probe, prove_kernels
from tgi_server.engine.runners.probe import LogitsProbe, probe_paged_path

ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
MOST_KERNELS = 12
# Operations of torch that launch nothing: they make tensors, or other views of them.
SILENT = ("empty", "new_empty", "view", "split", "slice", "select", "unsqueeze", "t", "transpose", "flatten")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(norm, "on_gpu", lambda x: True)
    monkeypatch.setattr(layer, "on_gpu", lambda x: True)
    monkeypatch.setattr(paged_attention, "_processors", lambda device: 4)
    monkeypatch.setattr(probe, "_LONG_RUN", 12)
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("size", [48, 768])
def test_norms(size: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(rows, size).to(dtype).squeeze(0) for rows in (3, 1, 1))
    wanted = torch.nn.functional.layer_norm(x.float(), (size,), weight.float(), bias.float(), 1e-5)
    actual = norm_and_gate.layer_norm(x, weight, bias, 1e-5).float()
    torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])
    wanted = torch.nn.functional.rms_norm(x.float(), (size,), weight.float(), 1e-5)
    for scale in (weight, weight.float()):
        actual = norm_and_gate.rms_norm(x, scale, 1e-5).float()
        torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])
    if dtype is torch.float16:  # bfloat16 is cut off by Triton's interpreter, not rounded
        once = (torch.nn.functional.rms_norm(x.float(), (size,), None, 1e-5) * weight.float()).to(dtype)
        torch.testing.assert_close(
            norm_and_gate.rms_norm(x, weight.float(), 1e-5), once, rtol=1e-2 * ERROR[dtype], atol=0
        )


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("gelu", [False, True])
def test_the_gate(gelu: bool, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2 * 1100).to(dtype) * 3
    gate, up = x.float().chunk(2, dim=1)
    opened = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    actual = norm_and_gate.gate_mul(x, gelu=gelu).float()
    torch.testing.assert_close(actual, opened * up, rtol=2 * ERROR[dtype], atol=2 * ERROR[dtype])


def fused(architecture: str, **settings: Any) -> tuple[Any, CudaAttention]:
    model = build(architecture, **settings)
    probe = probe_paged_path(model)
    assert probe is not None
    backend = CudaAttention(probe.shape, model.device, model.dtype)
    before = LogitsProbe(model, long=True)
    proved, _, fallbacks = prove_kernels(model, backend)
    assert (proved, fallbacks) == (backend, [])
    assert before.fault(backend, "fused layers") is None
    return model, backend


class Launches(TorchDispatchMode):
    """Names what would be a kernel on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self._inside = False
        launch = GridExecutor.__call__

        def launched(executor: GridExecutor, *arguments: Any, **options: Any) -> None:
            self.names.append(executor.fn.__name__)
            self._inside = True
            try:
                launch(executor, *arguments, **options)
            finally:
                self._inside = False

        monkeypatch.setattr(GridExecutor, "__call__", launched)

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        name = operation.name().removeprefix("aten::")
        if not self._inside and name.split(".")[0].removesuffix("_with_sizes") not in SILENT:
            self.names.append(name)
        return operation(*arguments, **(options or {}))


@pytest.mark.parametrize(
    "architecture", ["cohere", "gemma", "gemma2", "gemma3_text", "glm4", "granite", "olmo2", "smollm3"]
)
def test_layers_of_other_norms_gates_and_positions_are_fused(architecture: str) -> None:
    model, _ = fused(architecture)
    assert any(isinstance(module, DecoderLayer) for module in model.modules())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "opt"])
def test_a_model_of_fused_layers_has_few_kernels(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, backend = fused(architecture)
    layers = [module for module in model.modules() if isinstance(module, DecoderLayer)]
    assert len(layers) == model.config.num_hidden_layers
    counted: list[list[str]] = []
    forward = DecoderLayer.forward

    def watched(module: DecoderLayer, *arguments: Any, **options: Any) -> torch.Tensor:
        with monkeypatch.context() as patch, Launches(patch) as launches:
            output = forward(module, *arguments, **options)
        counted.append(launches.names)
        return output

    monkeypatch.setattr(DecoderLayer, "forward", watched)
    probe._run_long(model, backend, 12)
    # The first layer of a pass also plans the parts for all of them.
    assert max(map(len, counted[1 :: len(layers)])) <= MOST_KERNELS, " ".join(counted[1])


def test_a_layer_that_computes_something_else_is_put_back() -> None:
    model = build("llama")
    probe = probe_paged_path(model)
    assert probe is not None
    backend = CudaAttention(probe.shape, model.device, model.dtype)
    before = LogitsProbe(model, long=True)

    class Wrong(BlasLinear):
        def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return super().add_to(residual, 2 * x)

    reason = fuse(
        model,
        spec_of(model.config),
        before.variants,
        lambda: before.fault(backend, "fused layers"),
        LinearFactory(Wrong),
    )
    assert reason is not None
    assert reason.startswith("logits change by")
    assert not any(isinstance(module, DecoderLayer) for module in model.modules())
    assert before.fault(backend, "fused layers") is None
