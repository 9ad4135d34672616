"""Linear layers on a GPU: cuBLAS for dense weights; for quantized ones the fastest kernel that is right at load."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tgi_server.engine import proofs
from tgi_server.engine.checkpoint.quantized import QuantizedLinear, QuantizedWeight
from tgi_server.engine.kernels.triton import device_fault, variants
from tgi_server.engine.linear import LinearFactory
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.blas import BlasLinear
from tgi_server.engine.linear.humming import HUMMING, ROW_CLASSES, HummingLinear, takes
from tgi_server.engine.linear.kernel_table import SCALED_MM, KernelTable
from tgi_server.engine.linear.quantized import kind_of
from tgi_server.engine.parallel import ShardGroup, fault_of_any

logger = logging.getLogger(__name__)

TRITON = "triton"
# Numbers of rows in the checks, one for each shape of a program; and how many outputs of a weight are checked.
_ROWS = (2, 40, 130)
_OUTPUTS = 256
# humming-kernels compiles a kernel for a layer's sizes and a range of rows: each is checked with a whole layer.
_ROWS_OF_HUMMING = (1, *(rows + 1 for rows in ROW_CLASSES[:-1]))
# `_scaled_mm` needs multiples of _UNIT inputs and outputs and compute capability _OLDEST or newer; with scales for
# blocks of _BLOCK inputs, exactly _WITH_BLOCKS.
_UNIT, _BLOCK = 16, 128
_OLDEST, _WITH_BLOCKS = (8, 9), (9, 0)


@dataclass(slots=True)
class Findings:
    """Results of checking kernels, shared by a model and its drafter so that each kernel is checked once.

    faults: the fault of each kernel at each size; None: its results are right. fallbacks: reasons for slower kernels.
    """

    faults: dict[tuple[object, ...], str | None] = field(default_factory=dict)
    fallbacks: list[str] = field(default_factory=list)

    def fall_back(self, fallback: str) -> None:
        """Reports the reason for a slower kernel, once."""
        if fallback not in self.fallbacks:
            self.fallbacks.append(fallback)
            logger.warning(fallback)


def gpu_linear_factory(
    model: nn.Module, dtype: torch.dtype, group: ShardGroup | None = None, found: Findings | None = None
) -> tuple[LinearFactory, list[str]]:
    """Returns the factory of a model's linear layers on a GPU, and the reasons for slower kernels.

    Plain torch multiplies quantized weights of a kind for which no kernel is right. All shards choose the same kernels.
    found: results of another model with the same kernels; new ones are added.
    """
    found = found or Findings()
    by_kind: dict[str, list[QuantizedLinear]] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            by_kind.setdefault(kind_of(module.quantized), []).append(module)
    quantized: dict[str, KernelTable] = {}
    for kind, modules in sorted(by_kind.items()):
        if fault := device_fault(modules[0].quantized.codes.device):
            found.fall_back(f"{kind} weights are multiplied in plain torch, which is slow: {fault}")
            continue
        for name in _candidates(kind, modules, dtype, group):
            distinct = {module.in_features: module for module in modules} if name != HUMMING else {}
            tried = {(kind, name, size): module for size, module in distinct.items()}
            fault = next(filter(None, map(found.faults.get, tried)), None)
            if fault is None:
                new = [module for key, module in tried.items() if key not in found.faults]
                weights = [module.quantized.rows(slice(_OUTPUTS)) for module in new]
                fault = fault_of_any(fault_of(weights, name, dtype), group)
                found.faults |= dict.fromkeys(tried, fault)
            if fault is None:
                quantized[kind] = KernelTable.of(name)
                break
            found.fall_back(f"{kind} weights are multiplied in a slower way: {fault}")
    layer = _dense_layer(model, dtype, group, found)
    layers = LinearFactory(layer, None, quantized, dtype, ProvedLayers(found), kind_of=kind_of)
    return layers, found.fallbacks


def _dense_layer(model: nn.Module, dtype: torch.dtype, group: ShardGroup | None, found: Findings) -> type[PackedLinear]:
    """Returns the class for dense weights. found: gets the reason for a slower kernel."""
    plain = next((module for module in model.modules() if type(module) is nn.Linear), None)
    if "few_rows" not in variants() or dtype is not torch.bfloat16 or plain is None:
        return BlasLinear
    from tgi_server.engine.linear.few_rows import FewRowsLinear

    def cases() -> Iterator[proofs.Case]:
        weight = plain.weight[:_OUTPUTS]
        layer = FewRowsLinear(weight)
        for rows in (1, FewRowsLinear.few_rows):
            x = torch.randn(rows, weight.shape[1], device=weight.device).to(dtype)
            yield f"for {rows} rows", layer(x), linear(x, weight)

    fault = device_fault(plain.weight.device) or proofs.fault_of("the kernel for few rows", cases)
    if (fault := fault_of_any(fault, group)) is None:
        return FewRowsLinear
    found.fall_back(f"few rows are multiplied by cuBLAS: {fault}")
    return BlasLinear


class ProvedLayers:
    """Makes quantized layers, by humming-kernels only for the shapes for which its results are right."""

    def __init__(self, found: Findings) -> None:
        self._found = found

    def __call__(
        self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable, dtype: torch.dtype
    ) -> PackedLinear:
        """Returns a layer for a weight, [outputs, inputs], and a bias, by the kernel that the table names."""
        if kernels.kernels != (HUMMING,):
            return quantized_layer(weight, bias, kernels, dtype)
        shape = weight.shape, weight.group_size, bias is None
        faults = self._found.faults
        if shape not in faults:
            fault = faults[shape] = fault_of([weight], HUMMING, dtype, bias, _ROWS_OF_HUMMING)
            if fault is not None:
                self._found.fall_back(f"int4 weights of shape {shape[0]} are multiplied in a slower way: {fault}")
        if faults[shape] is None:
            return HummingLinear(weight, bias, kernels, dtype)
        return quantized_layer(weight, bias, KernelTable.of(TRITON), dtype)


def quantized_layer(
    weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable, dtype: torch.dtype
) -> PackedLinear:
    """Returns a layer for a weight, [outputs, inputs], and a bias, by the kernel that the table names."""
    if kernels.kernels == (SCALED_MM,):
        from tgi_server.engine.linear.scaled import ScaledLinear

        return ScaledLinear(weight, bias, kernels, dtype)
    if kernels.kernels == (HUMMING,):
        return HummingLinear(weight, bias, kernels, dtype)
    from tgi_server.engine.linear.triton_quantized import TritonLinear

    return TritonLinear(weight, bias, kernels, dtype)


def fault_of(
    weights: Iterable[QuantizedWeight],
    name: str,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    row_counts: Sequence[int] = _ROWS,
) -> str | None:
    """Multiplies some rows by each weight. Returns the reason not to use the kernel; None if it is right."""

    def cases() -> Iterator[proofs.Case]:
        for weight in weights:
            layer, dense = quantized_layer(weight, bias, KernelTable.of(name), dtype), weight.dense(dtype)
            generator = torch.Generator(dense.device).manual_seed(0)
            added = None if bias is None else bias.to(dtype)
            for rows in row_counts:
                x = torch.randn(rows, weight.shape[1], generator=generator, device=dense.device).to(dtype)
                yield f"for {rows} rows of {weight.shape[1]} inputs", layer(x), linear(x, dense, added)

    return proofs.fault_of(name, cases, allowance=proofs.FP8_INPUTS if name == SCALED_MM else 0.0)


def _candidates(
    kind: str, modules: list[QuantizedLinear], dtype: torch.dtype, group: ShardGroup | None
) -> tuple[str, ...]:
    """Returns the names of kernels for quantized weights of a kind, the fastest first."""
    faster = {"fp8": (SCALED_MM, _has_scaled_mm), "int4": (HUMMING, takes)}
    if kind not in faster:
        return (TRITON,)
    name, fits = faster[kind]
    all_fit = all(fits(module, dtype) for module in modules)
    if group is not None:
        all_fit = bool(group.minimum(int(all_fit)))
    return (name, TRITON) if all_fit else (TRITON,)


def _has_scaled_mm(module: QuantizedLinear, dtype: torch.dtype) -> bool:
    """Returns True if torch's `_scaled_mm` can multiply this layer of FP8 on its device.

    The layer must have one scale for each output, or one for each block of 128 inputs of an output.
    """
    weight, sizes = module.quantized, (module.out_features, module.in_features)
    if dtype is not torch.bfloat16 or weight.zeros is not None:
        return False
    capability = torch.cuda.get_device_capability(weight.codes.device)
    if weight.group_count == 1:
        return capability >= _OLDEST and not any(size % _UNIT for size in sizes)
    in_blocks = weight.group_size == _BLOCK and not any(size % _BLOCK for size in sizes)
    return in_blocks and capability == _WITH_BLOCKS
