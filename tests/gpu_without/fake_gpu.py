"""A GPU that computes nothing: torch's fake tensors, Triton kernels that are not run, and memory that is counted.

    with FakeGpu(monkeypatch, 24 << 30) as gpu:
        engine = gpu.engine(gpu.model("llama", hidden_size=4096, ...))

A fake tensor knows its shape, its dtype and its device, and nothing else. So an operation on tensors of two devices is
an error, and so is whatever needs to know what the GPU would compute: there the host would wait for it.
"""

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, PreTrainedModel
from triton.runtime.interpreter import GridExecutor

from tests.tiny_models import configuration
from tgi_server.engine import Engine, EngineConfig, proofs
from tgi_server.engine.backends import triton_lora
from tgi_server.engine.backends.probe import LogitsProbe
from tgi_server.engine.checkpoint.quantized import Experts, QuantizedLinear, QuantizedWeight
from tgi_server.engine.linear import gpu, grouped_experts, triton_quantized
from tgi_server.engine.runners import graphs
from tgi_server.engine.sampling import torch_sampler
from tgi_server.engine.sampling.logprobs import Sampled
from tgi_server.engine.speculation import costs

T = TypeVar("T")

DEVICE = torch.device("cuda", 0)
# Bytes that a process takes of a GPU before it has any tensor, roughly.
CONTEXT = 500 << 20
# Compute capabilities of GPUs on which torch's `grouped_mm` is one kernel, in bfloat16.
GROUPED_MM = {(9, 0), (10, 0)}
# CUDA's caching allocator gives out multiples of so many bytes.
_GRAIN = 512
_PROCESSORS = 132
_SHARED_BYTES = 227 << 10
# Inputs of a group of quantised weights.
_GROUP = 32
# What a layer's output is multiplied by.
_LAYER_SCALE = torch.tensor([0.75])


class FakeGpu(TorchDispatchMode):
    """total: bytes of memory. live, peak: bytes of tensors, now and at most so far. kept: those of captured graphs.

    waits: copies between host and device that the host would wait for. programs: those that Triton would compile for
    the kernels that were launched so far.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, total: int = 80 << 30, capability: tuple[int, int] = (9, 0)
    ) -> None:
        super().__init__()
        self.capability = capability
        self.total = total
        self.live = self.peak = self.kept = 0
        self.waits: list[str] = []
        self.programs: set[tuple[Any, ...]] = set()
        self._storages = WeakIdKeyDictionary()
        self._pinned = WeakIdKeyDictionary()
        self._fake = FakeTensorMode()
        self._stand_in(monkeypatch)

    def __enter__(self) -> Self:
        self._fake.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        tensors = [each for each in tree_leaves((arguments, options)) if isinstance(each, Tensor)]
        if (options or {}).get("device") == DEVICE:
            for tensor in tensors:
                tensor.constant = None  # or torch would compute with the value that it knows, on a GPU
        if operation.overloadpacket is torch.ops.aten._grouped_mm:
            output = self._grouped_mm(*tensors[:2])
        else:
            output = operation(*arguments, **(options or {}))
        made = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        self._note_wait(operation, tensors, made)
        for tensor in made:
            if tensor.device.type == "cuda":
                self._hold(tensor.untyped_storage())
        return output

    def model(
        self, architecture: str, dtype: torch.dtype = torch.bfloat16, quantized: str = "", **settings: Any
    ) -> PreTrainedModel:
        """Returns a model of the architecture with these settings, on the device.

        quantized: "int4" or "fp8", the codes that its linear layers have, but for the head.
        """
        with DEVICE:
            model = AutoModelForCausalLM.from_config(configuration(architecture, **settings), dtype=dtype)
            if quantized:
                _quantize(model, quantized)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):  # of Gemma 4, a number of the checkpoint that is read at load
                buffer.constant = _LAYER_SCALE
        return model.eval().requires_grad_(False)

    def engine(self, model: PreTrainedModel, *, kernels: bool = True, **settings: Any) -> Engine:
        """Returns an engine for the model, with the kernels for GPUs or in plain torch."""
        return Engine(EngineConfig(Path("/nowhere"), device=DEVICE, custom_kernels=kernels, **settings), model)

    def _hold(self, storage: Any) -> None:
        if storage in self._storages:
            return
        size = -(-storage.nbytes() // _GRAIN) * _GRAIN
        self._storages[storage] = size
        weakref.finalize(storage, self._free, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _free(self, size: int) -> None:
        self.live -= size

    def let_go(self, kept: int) -> None:
        """Frees the memory of graphs that can no longer be replayed."""
        self.kept -= kept

    def _grouped_mm(self, x: Tensor, weights: Tensor) -> Tensor:
        """Makes the host wait where torch has no kernel for this product, because it then reads the groups' ends."""
        if x.dtype is not torch.bfloat16 or self.capability not in GROUPED_MM:
            self.waits.append(f"grouped_mm in {x.dtype}")
        return x.new_empty(len(x), weights.shape[-1])

    def _note_wait(self, operation: Any, taken: list[Tensor], made: list[Tensor]) -> None:
        if operation.overloadpacket not in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            return
        source, target = taken[-1], made[0]
        if source.device.type != target.device.type and not (source in self._pinned or target in self._pinned):
            self.waits.append(f"{operation} of {tuple(source.shape)}")

    def _stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = {
            "empty_cache": lambda: None,
            "synchronize": lambda device=None: None,
            "mem_get_info": lambda device=None: (self.total - CONTEXT - self.live - self.kept, self.total),
            "memory_reserved": lambda device=None: self.live,
            "max_memory_allocated": lambda device=None: self.peak,
            "reset_peak_memory_stats": self._forget_peak,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device=None: SimpleNamespace(
                multi_processor_count=_PROCESSORS, shared_memory_per_block_optin=_SHARED_BYTES
            ),
        }
        for name, stand_in in cuda.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor))
        monkeypatch.setattr(Sampled, "start_copy", lambda sampled: None)
        monkeypatch.setattr(graphs, "_CudaCapture", lambda device: _Capture(self))
        monkeypatch.setattr(proofs, "relative_error", lambda actual, known: 0.0)
        monkeypatch.setattr(proofs, "logits_error", lambda actual, known: 0.0)
        monkeypatch.setattr(LogitsProbe, "fault", lambda *_: None)
        monkeypatch.setattr(torch_sampler, "share_equal", lambda left, right: 1.0)
        monkeypatch.setattr(torch, "equal", lambda left, right: True)
        monkeypatch.setattr(gpu, "fault_of", lambda *_: None)
        monkeypatch.setattr(costs, "_seconds", lambda compute: (compute(), 1e-3)[1])
        monkeypatch.setattr(grouped_experts, "_fault_of", lambda *_: None)
        monkeypatch.setattr(triton_lora, "fault_of", lambda *_: None)
        monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 16)
        monkeypatch.setattr(triton_quantized, "arrangement", _arrangement)
        programs = self.programs
        monkeypatch.setattr(
            GridExecutor,
            "__call__",
            lambda executor, *arguments, **options: programs.add(_program(executor.fn, arguments, options)),
        )

    def _forget_peak(self, device: object = None) -> None:
        self.peak = self.live

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned[tensor] = True
        return tensor


class _Capture:
    """Computes a step once, as the capture of a CUDA graph does, whose tensors share memory with other graphs'."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self._kept = 0

    def __call__(self, step: Callable[[], T]) -> Callable[[], T]:
        gpu, peak = self._gpu, self._gpu.peak
        before = gpu.peak = gpu.live
        waits = len(gpu.waits)
        output = step()
        if gpu.waits[waits:]:
            raise RuntimeError(f"called a synchronizing CUDA operation: {gpu.waits[waits]}")
        more = max(0, gpu.peak - before - self._kept)
        self._kept += more
        gpu.kept += more
        gpu.peak = max(peak, gpu.peak)
        weakref.finalize(self, gpu.let_go, more)
        return lambda: (self, output)[1]  # the graph lives as long as it can be replayed


def _quantize(model: PreTrainedModel, kind: str) -> None:
    for path, module in list(model.named_modules()):
        if Experts.fits(module):
            module = Experts.quantized(module, 1 if module.is_transposed or not module.has_gate else 2)
            model.set_submodule(path, module)
            for layer in module.modules():
                if isinstance(layer, QuantizedLinear):
                    layer.fill(_weight(layer.out_features, layer.in_features, kind))
        elif type(module) is torch.nn.Linear and module is not model.get_output_embeddings():
            layer = QuantizedLinear(module)
            layer.fill(_weight(module.out_features, module.in_features, kind))
            model.set_submodule(path, layer)


def _weight(outputs: int, inputs: int, kind: str) -> QuantizedWeight:
    groups = torch.arange(inputs) // (_GROUP if kind == "int4" else inputs)
    scales = torch.empty(outputs, -(-inputs // _GROUP) if kind == "int4" else 1)
    if kind == "int4":
        pairs = torch.empty(outputs, -(-inputs // 2), dtype=torch.uint8)
        return QuantizedWeight(pairs, torch.empty(16), scales, scales, groups)
    return QuantizedWeight(torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn), None, scales, None, groups)


def _arrangement(groups: Tensor, sizes: Iterable[int]) -> tuple[int, None, Tensor]:
    """Returns blocks of inputs in unchanged order, with undefined groups."""
    return _GROUP, None, torch.empty(-(-len(groups) // _GROUP), dtype=torch.int32, device=groups.device)


def _program(kernel: Any, arguments: Iterable[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Returns what Triton specializes a kernel for: constants, dtypes, and properties of addresses and numbers."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    constant = {name for name, kind in kernel.__annotations__.items() if kind is tl.constexpr}
    given = dict(zip(names, arguments, strict=False)) | options
    any_value = kernel.__globals__[kernel.__name__].kwargs["do_not_specialize"] or ()
    facts = [
        (name, value if name in constant or name not in names else _kind(value, any_value=name in any_value))
        for name, value in given.items()
    ]
    return (kernel.__name__, *sorted(facts, key=lambda fact: fact[0]))


def _kind(value: Any, *, any_value: bool) -> object:
    """Returns what a kernel is compiled for. any_value: for numbers and addresses of any kind."""
    if isinstance(value, Tensor):
        return value.dtype, any_value or value.storage_offset() * value.element_size() % 16 == 0
    if isinstance(value, int) and not any_value:
        return 1 if value == 1 else "16" if value % 16 == 0 else "int"
    return type(value)
