"""Linear layers on a GPU: dense weights stay with cuBLAS, and a kernel for quantized ones is proved at load."""

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tgi_server.engine import proofs
from tgi_server.engine.checkpoint.quantized import QuantizedLinear, QuantizedWeight
from tgi_server.engine.kernels.triton import device_fault
from tgi_server.engine.linear import LinearFactory
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.blas import BlasLinear
from tgi_server.engine.linear.humming import HUMMING, ROW_CLASSES, HummingLinear, takes
from tgi_server.engine.linear.kernel_table import SCALED_MM, KernelTable
from tgi_server.engine.linear.quantized import kind_of
from tgi_server.engine.parallel import ShardGroup, fault_of_any

logger = logging.getLogger(__name__)

TRITON = "triton"
# Rows by which a weight is multiplied, one number for each shape of a program; and how many outputs of it.
_ROWS = (2, 40, 130)
_OUTPUTS = 256
# Kernels of humming-kernels are compiled for a layer's sizes and a class of rows: each is proved, with a whole layer.
_ROWS_OF_HUMMING = (1, *(rows + 1 for rows in ROW_CLASSES[:-1]))
# The product of FP8 takes multiples of this many inputs and outputs, on devices of this compute capability and newer.
# With scales for blocks of this many inputs, on the other one alone.
_UNIT, _BLOCK = 16, 128
_OLDEST, _WITH_BLOCKS = (8, 9), (9, 0)


def gpu_linear_factory(
    model: nn.Module, dtype: torch.dtype, group: ShardGroup | None = None
) -> tuple[LinearFactory, list[str]]:
    """Returns the factory of a model's linear layers on a GPU, and why quantized weights take a slower path.

    Weights of a kind for which no kernel is right stay what they are, in plain torch. All shards choose the same.
    """
    by_kind: dict[str, list[QuantizedLinear]] = {}
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            by_kind.setdefault(kind_of(module.quantized(0, 1)), []).append(module)
    quantized: dict[str, KernelTable] = {}
    fallbacks = []
    for kind, modules in sorted(by_kind.items()):
        if fault := device_fault(modules[0].scales.device):
            fallbacks.append(f"{kind} weights are multiplied in plain torch, which is slow: {fault}")
            logger.warning(fallbacks[-1])
            continue
        for name in _candidates(kind, modules, dtype, group):
            distinct = {module.in_features: module for module in modules}.values() if name != HUMMING else ()
            fault = fault_of_any(fault_of([module.quantized(0, _OUTPUTS) for module in distinct], name, dtype), group)
            if fault is None:
                quantized[kind] = KernelTable.of(name)
                break
            fallbacks.append(f"{kind} weights are multiplied in a slower way: {fault}")
            logger.warning(fallbacks[-1])
    layers = LinearFactory(BlasLinear, None, quantized, dtype, ProvedLayers(fallbacks), kind_of=kind_of)
    return layers, fallbacks


class ProvedLayers:
    """Makes the quantized layers of one model; of humming-kernels only with the shapes for which it is right.

    fallbacks: reasons are added to it.
    """

    def __init__(self, fallbacks: list[str]) -> None:
        self._fallbacks = fallbacks
        self._faults: dict[tuple[object, ...], str | None] = {}

    def __call__(
        self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable, dtype: torch.dtype
    ) -> PackedLinear:
        """Returns a layer for a weight, [outputs, inputs], and a bias, by the kernel that the table names."""
        if kernels.kernels != (HUMMING,):
            return quantized_layer(weight, bias, kernels, dtype)
        shape = weight.shape, weight.group_size, bias is None
        if shape not in self._faults:
            fault = self._faults[shape] = fault_of([weight], HUMMING, dtype, bias, _ROWS_OF_HUMMING)
            if fault is not None:
                self._fallbacks.append(f"int4 weights of shape {shape[0]} are multiplied in a slower way: {fault}")
                logger.warning(self._fallbacks[-1])
        if self._faults[shape] is None:
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
    """Multiplies some rows by each weight. Returns why a kernel must not be used, in words; None if it is right."""

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
    """Returns True if torch has a product in bfloat16 for this layer of FP8 on its device.

    That is for a scale for each output, or for each of its blocks of 128 inputs.
    """
    if dtype is not torch.bfloat16 or module.zeros is not None:
        return False
    capability = torch.cuda.get_device_capability(module.scales.device)
    sizes = module.out_features, module.in_features
    if module.scales.shape[1] == 1:
        return capability >= _OLDEST and not any(size % _UNIT for size in sizes)
    in_blocks = module.quantized(0, 1).group_size == _BLOCK and not any(size % _BLOCK for size in sizes)
    return in_blocks and capability == _WITH_BLOCKS
