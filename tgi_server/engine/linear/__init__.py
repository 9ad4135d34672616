"""Linear layers, y = x W^T + b: one file for each kind of weights, and the choice among kernels."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor, nn

from tgi_server.engine.checkpoint.quantized import QuantizedLinear, QuantizedWeight
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.choice import A8, Weights, choose_kernels, quantized_kinds
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.int8 import Int8Linear
from tgi_server.engine.linear.kernel_linear import SideBySideLinear
from tgi_server.engine.linear.kernel_table import SCALED_MM, KernelTable
from tgi_server.engine.linear.onednn import OneDnnLinear
from tgi_server.engine.linear.quantized import PackedQuantizedLinear, packed_kind_of

__all__ = ["KernelTable", "LinearFactory", "PackedLinear", "linear_factory"]

Linear = nn.Linear | QuantizedLinear


@dataclass(frozen=True, slots=True)
class LinearFactory:
    """Makes the linear layers of one model: all of a kind of weights with the same kernels.

    layer: the class for layers with dense weights, and `kernels` its kernels. quantized: the kernels of each kind of
    quantized weights; layers of other kinds become `layer` if that has 8 bits, and otherwise stay as they are. dtype:
    the model's dtype. quantized_layer: makes a quantized layer of a weight, a bias, the kernels and the dtype.
    side_by_side: makes one layer of several with different kinds of weights; None: these are widened to 8 bits.
    kind_of: returns the kind of a weight.
    """

    layer: type[PackedLinear]
    kernels: KernelTable | None = None
    quantized: Mapping[str, KernelTable] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    quantized_layer: Callable[[QuantizedWeight, Tensor | None, KernelTable, torch.dtype], PackedLinear] = (
        PackedQuantizedLinear
    )
    side_by_side: Callable[[Sequence[PackedLinear]], PackedLinear] | None = None
    kind_of: Callable[[QuantizedWeight], str] = packed_kind_of

    @property
    def rounding(self) -> float:
        """Returns how much the layers may change a model's logits, as a share of the logits' norm."""
        rounds_inputs = any({*A8, SCALED_MM} & set(table.kernels) for table in self.quantized.values())
        return max(self.layer.rounding, Int8Linear.rounding if rounds_inputs else 0)

    def __str__(self) -> str:
        """Returns the kernels, for people."""
        quantized = [f"{table} ({kind})" for kind, table in self.quantized.items()]
        own = str(self.kernels) if self.kernels else "onednn" if self.layer is OneDnnLinear else "torch"
        return ", ".join([*quantized, own])

    def takes(self, module: nn.Module) -> bool:
        """Returns True for a layer that it can replace."""
        if isinstance(module, QuantizedLinear):
            return self.layer is Int8Linear or self.kind_of(module.quantized) in self.quantized
        return type(module) is nn.Linear

    def joins(self, *modules: nn.Module) -> bool:
        """Returns True if it can make one layer of these modules, which have the same input."""
        return self.merges(*modules) or (self.side_by_side is not None and all(map(self.takes, modules)))

    def merges(self, *modules: nn.Module) -> bool:
        """Returns True if it can make one layer, with one weight, of these modules, which have the same input."""
        quantized = [module for module in modules if isinstance(module, QuantizedLinear)]
        if not all(map(self.takes, modules)) or 0 < len(quantized) < len(modules):
            return False
        weights = [module.quantized for module in quantized]
        return all(weights[0].joins(weight) for weight in weights)

    def __call__(self, module: Linear) -> PackedLinear:
        if isinstance(module, QuantizedLinear):
            return self._quantized(module.quantized, module)
        return self.layer(module.weight, module.bias, self.kernels)

    def joined(self, *modules: Linear) -> PackedLinear:
        """Returns one layer for modules with the same input; its outputs are theirs, concatenated."""
        if self.side_by_side is not None and self.layer is not Int8Linear:
            alike = [list(group) for _, group in groupby(modules, _kind)]
            if len(alike) > 1:
                return self.side_by_side([self.merged(*group) if len(group) > 1 else self(*group) for group in alike])
        return self.merged(*modules)

    def merged(self, *modules: Linear) -> PackedLinear:
        """Returns one layer, with one weight; it has 8 bits if the layers have different kinds of weights."""
        quantized = [module for module in modules if isinstance(module, QuantizedLinear)]
        if quantized:
            return self._quantized(QuantizedWeight.joined([module.quantized for module in quantized]), *quantized)
        plain = [module for module in modules if isinstance(module, nn.Linear)]
        return self.layer.joined(*plain, kernels=self.kernels)

    def _quantized(self, weight: QuantizedWeight, *modules: QuantizedLinear) -> PackedLinear:
        """Returns a quantized layer with the weight and the concatenated biases; an 8-bit one for an Int8Linear."""
        biases = [module.bias for module in modules]
        bias = None
        if any(bias is not None for bias in biases):
            filled = [
                torch.zeros(module.out_features, device=weight.codes.device) if bias is None else bias.float()
                for module, bias in zip(modules, biases, strict=True)
            ]
            bias = torch.cat(filled)
        if self.layer is Int8Linear:
            assert self.kernels is not None
            if self.kind_of(weight) == "int8":
                return self.quantized_layer(weight, bias, self.kernels, self.dtype)
            return Int8Linear(weight.dense(self.dtype), bias, self.kernels)
        return self.quantized_layer(weight, bias, self.quantized[self.kind_of(weight)], self.dtype)


def _kind(module: Linear) -> Hashable:
    """Returns a key that is equal for layers whose weights can be concatenated without a conversion."""
    if not isinstance(module, QuantizedLinear):
        return None
    weight = module.quantized
    book = None if weight.codebook is None else tuple(weight.codebook.tolist())
    return weight.codes.dtype, weight.six_bits, book, tuple(weight.groups.tolist())


def linear_factory(
    model: nn.Module,
    dtype: torch.dtype,
    quantize: str | None,
    *,
    pinned: str | None = None,
) -> LinearFactory:
    """Returns the factory of a model's linear layers on a CPU, quantized if that is requested.

    pinned: the kernels to use, as text of a KernelTable; if the model has quantized weights, only for these; None:
    those of the table in the repository. Raises UnsupportedModel for kernels that this CPU does not have. If the
    kernels are not compiled, oneDNN computes dense layers, and quantized ones are left as they are.
    """
    if not load_kernels():
        return LinearFactory(OneDnnLinear)
    kinds = quantized_kinds(model)
    layer: type[PackedLinear] = FloatLinear
    weights = Weights.plain(dtype)
    if quantize == "int8":  # also the weights that the checkpoint has in another form
        layer, weights, kinds = Int8Linear, Weights.quantized("int8", dtype), []
    quantized = {kind: _table(pinned, Weights.quantized(kind, dtype)) for kind in kinds}
    table = _table(None if quantized else pinned, weights)
    return LinearFactory(layer, table, quantized, dtype, side_by_side=SideBySideLinear)


def _table(pinned: str | None, weights: Weights) -> KernelTable:
    return choose_kernels(weights) if pinned is None else _pinned(pinned, weights)


def _for_bits(name: str, bits: int, known: Sequence[str]) -> str:
    """Returns the kernel for weights of `bits` bits that corresponds to the one with this name for 4 bits."""
    wider = name.replace("w4", f"w{bits}", 1)
    return wider if wider in known else name


def _pinned(text: str, weights: Weights) -> KernelTable:
    try:
        table = KernelTable.of(text)
    except ValueError as error:
        raise UnsupportedModel(f"--linear-kernels: {error}") from error
    known = [*weights.kernels, *weights.by_name]
    table = replace(table, kernels=tuple(_for_bits(name, weights.bits, known) for name in table.kernels))
    if unknown := [name for name in table.kernels if name not in known]:
        raise UnsupportedModel(
            f"--linear-kernels: this CPU has no {', '.join(unknown)} for these weights; it has {', '.join(known)}"
        )
    return table
