"""Decoder layers fused for GPUs, in the interpreter, against those of `transformers`; their kernels are counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from tests.tiny_models import build
from tests.unit.engine.backends.test_cpu import IN_ONE_CALL
from tests.unit.engine.kernels.cpu.ops.test_norm_rope_gate import ACTIVATIONS
from tests.unit.engine.probed import by_spec, probed
from tgi_server.engine import EngineConfig
from tgi_server.engine.backends import PassInput, cuda_model, probe
from tgi_server.engine.backends.attention.base import ChunkSpan, ForwardMetadata
from tgi_server.engine.backends.attention.cuda_latents import LatentAttention
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.cuda import CudaBackend
from tgi_server.engine.backends.cuda_model import CudaModel
from tgi_server.engine.backends.lora import AdapterRows, TorchLora
from tgi_server.engine.backends.probe import LogitsProbe, long_logits
from tgi_server.engine.backends.reference import ReferenceModel
from tgi_server.engine.kernels.triton import norm_and_gate, split_kv
from tgi_server.engine.linear import grouped_experts
from tgi_server.engine.lora.adapter import AdapterLayer
from tgi_server.engine.lora.loaded import _delta
from tgi_server.engine.models.families import family_of, spec_of
from tgi_server.engine.runners.hidden_states import HiddenStates

ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
MOST_KERNELS = 12
# Of a layer in a step in which sequences decode; `to.dtype`, once or twice, launches nothing in float32.
MIXTURES_AND_LATENTS = {"deepseek_v3": 22, "deepseek_v2": 21, "glm4_moe_lite": 22, "minicpm3": 15, "qwen3_moe": 17}
# Operations of torch that launch nothing: they make tensors, or other views of them.
SILENT = ("empty", "new_empty", "view", "split", "slice", "select", "unsqueeze", "t", "transpose", "flatten")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(split_kv, "multiprocessors", lambda device: 4)
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
    residual, heads = torch.randn(3, size).to(dtype), torch.randn(3, 5, size).to(dtype)[:, :2]
    for scale in (weight, weight.float()):
        actual = norm_and_gate.rms_norm(x, scale, 1e-5).float()
        torch.testing.assert_close(actual, wanted, rtol=ERROR[dtype], atol=ERROR[dtype])
        actual = norm_and_gate.rms_norm(x, scale, 1e-5, residual, 0.5).float()
        torch.testing.assert_close(actual, residual + wanted / 2, rtol=ERROR[dtype], atol=2 * ERROR[dtype])
        actual = norm_and_gate.rms_norm(heads, scale, 1e-5)
        known = norm_and_gate.rms_norm(heads.contiguous(), scale, 1e-5)
        torch.testing.assert_close(actual, known, rtol=0, atol=0)
    if dtype is torch.float16:  # bfloat16 is cut off by Triton's interpreter, not rounded
        once = (torch.nn.functional.rms_norm(x.float(), (size,), None, 1e-5) * weight.float()).to(dtype)
        torch.testing.assert_close(
            norm_and_gate.rms_norm(x, weight.float(), 1e-5), once, rtol=1e-2 * ERROR[dtype], atol=0
        )


@pytest.mark.parametrize("dtype", ERROR)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 2 * 1100).to(dtype) * 3
    gate, up = x.float().chunk(2, dim=1)
    close = {"rtol": 2 * ERROR[dtype], "atol": 2 * ERROR[dtype]}
    wanted = ACTIVATIONS[activation]
    torch.testing.assert_close(norm_and_gate.activate(x, activation, gated=True).float(), wanted(gate) * up, **close)
    torch.testing.assert_close(norm_and_gate.activate(x, activation, gated=False).float(), wanted(x.float()), **close)


def fused(architecture: str) -> tuple[CudaModel, LogitsProbe]:
    """Returns the model of a spec, and a probe of the same model's logits in plain torch."""
    before = LogitsProbe(by_spec(build(architecture)), long=True)
    model = build(architecture)
    backend = CudaBackend(model, EngineConfig(Path("/nowhere")))
    proved = backend.create_model(family_of(model.config), spec_of(model.config))
    assert architecture == "llama4_text" or backend.fallbacks == []  # for whose chunks there is no kernel
    assert isinstance(proved, CudaModel)
    assert before.fault(proved, "fused layers") is None
    return proved, before


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


@pytest.mark.parametrize("architecture", IN_ONE_CALL)
def test_layers_of_all_norms_gates_and_positions_are_fused(architecture: str) -> None:
    model, _ = fused(architecture)
    assert len(model.decoder.layers) == model.source.config.num_hidden_layers
    assert not any(hasattr(module, "layer_idx") for module in model.source.modules()), "weights are there once"


@pytest.mark.parametrize(("architecture", "kind"), [("deepseek_v3", LatentAttention), ("glm_moe_dsa", GatherAttention)])
def test_latents_have_a_kernel_of_their_own_but_for_an_index(architecture: str, kind: type[GatherAttention]) -> None:
    model = build(architecture)
    backend = CudaBackend(model, EngineConfig(Path("/nowhere")))
    proved = backend.create_model(family_of(model.config), spec_of(model.config))
    assert isinstance(proved, CudaModel)
    assert type(proved.attention) is kind
    reason = "attention runs in plain torch, which is slower: the kernel has no index of sparse attention"
    assert backend.fallbacks == ([] if kind is LatentAttention else [reason])


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "opt"])
def test_a_model_of_fused_layers_has_few_kernels(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = fused(architecture)
    counted: list[list[str]] = []
    compute = CudaModel._layer

    def watched(*arguments: Any) -> torch.Tensor:
        with monkeypatch.context() as patch, Launches(patch) as launches:
            output = compute(*arguments)
        counted.append(launches.names)
        return output

    monkeypatch.setattr(CudaModel, "_layer", watched)
    long_logits(model, 12)
    # The first layer of a pass also plans the parts for all of them.
    for names in counted[1 :: len(model.decoder.layers)]:
        beside_prompts = 2 * (names.count("_attend_part") - 1)  # attention of rows that decode, and its joining
        assert len(names) <= MOST_KERNELS + beside_prompts, " ".join(names)


def counted(proved: CudaModel, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Returns the kernels of each layer in a step in which sequences decode."""
    found: list[list[str]] = []
    compute = CudaModel._layer

    def watched(model: CudaModel, layer: Any, residual: torch.Tensor, step: Any) -> torch.Tensor:
        with monkeypatch.context() as patch, Launches(patch) as launches:
            output = compute(model, layer, residual, step)
        if not step.metadata.chunks:
            found.append(launches.names)
        return output

    with monkeypatch.context() as patch:
        patch.setattr(CudaModel, "_layer", watched)
        long_logits(proved, 12)
    assert len(found) == len(proved.decoder.layers)
    return found


@pytest.mark.parametrize(("architecture", "most"), MIXTURES_AND_LATENTS.items())
def test_layers_of_latents_and_mixtures_have_few_kernels(
    architecture: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer also plans, for all; the last of these families have a mixture."""
    monkeypatch.setattr(grouped_experts, "_waits", lambda _: True)
    proved, _ = fused(architecture)
    names = counted(proved, monkeypatch)[-1]
    assert len(names) <= most, " ".join(names)


@pytest.mark.parametrize(
    ("kernel", "what"),
    [("fault_of_routing", "experts are chosen"), ("fault_of_latents", "latents are written")],
)
def test_parts_whose_kernels_are_wrong_stay_in_plain_torch(
    kernel: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = LogitsProbe(by_spec(build("deepseek_v3")), long=True)
    monkeypatch.setattr(cuda_model, kernel, lambda *_, **__: "the kernel is off by 1")
    model = build("deepseek_v3")
    backend = CudaBackend(model, EngineConfig(Path("/nowhere")))
    proved = backend.create_model(family_of(model.config), spec_of(model.config))
    assert isinstance(proved, CudaModel)
    assert backend.fallbacks == [f"{what} in plain torch, which is slower: the kernel is off by 1"]
    assert before.fault(proved, "fused layers") is None


def test_layers_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    before = LogitsProbe(by_spec(build("llama")), long=True)
    activate = norm_and_gate.activate
    monkeypatch.setattr(norm_and_gate, "activate", lambda x, name, gated: 2 * activate(x, name, gated=gated))
    backend = CudaBackend(model, EngineConfig(Path("/nowhere")))
    proved = backend.create_model(family_of(model.config), spec_of(model.config))
    (reason,) = backend.fallbacks
    assert reason.startswith("decoder layers are not fused, which is slow: the model with fused layers is off by")
    assert type(proved) is ReferenceModel
    assert before.fault(proved, "nothing") is None


@pytest.mark.parametrize("architecture", ["llama", "opt"])
def test_adapters_and_hidden_states_are_those_of_transformers(architecture: str) -> None:
    """Rows of two adapters and of none, in every linear layer, with the inputs of the head and of a layer."""
    model, _ = fused(architecture)
    generic, _ = probed(build(architecture))
    generic.attention = GatherAttention(generic.kv_shape, torch.device("cpu"), torch.float32)
    outputs, states = [], []
    places = torch.arange(6)
    metadata = ForwardMetadata(
        slots=32 + places,
        block_tables=torch.tensor([[1]], dtype=torch.int32),
        kv_lengths=torch.tensor([6], dtype=torch.int32),
        query_starts=torch.tensor([0, 6], dtype=torch.int32),
        decoding=0,
        chunks=[ChunkSpan(0, 6, 6)],
        max_kv_length=6,
    )
    adapters, wanted = torch.tensor([0, 1, 2, 1, 0, 2], dtype=torch.int32), torch.tensor([1, 4, 5])
    rows = AdapterRows(adapters, frozenset({1, 2}), wanted)
    linears = {
        path: module for path, module in build(architecture).named_modules() if isinstance(module, torch.nn.Linear)
    }
    deltas = [
        {path: AdapterLayer(torch.randn(3, m.in_features) / 9, torch.randn(m.out_features, 3)) for path, m in each}
        for each in (linears.items(), list(linears.items())[::2])
    ]
    for each in (model, generic):
        kept = HiddenStates((1,))
        each.tap(kept.indices, kept.keep)
        each.attention.block_size = 32
        for place in each.adapt(lambda outputs, parts: TorchLora()):
            for number, layers in enumerate(deltas, start=1):
                if (change := _delta(place, layers, torch.float32)) is not None:
                    place.put(number, change)
        each.allocate(2)
        outputs.append(each.forward(PassInput(places + 7, places, metadata, wanted, rows)))
        states.append([kept.head, *kept.layers])
    torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
    for actual, expected in zip(*states, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
