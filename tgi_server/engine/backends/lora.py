"""LoRA deltas of linear layers, computed for the rows that have an adapter: in plain torch, and by the CPU kernels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from tgi_server.engine.memory import to_device


@dataclass(slots=True, eq=False)
class AdapterRows:
    """The rows of a pass in which some have an adapter.

    numbers: [rows] int32 on the device, the number of each row's adapter; 0: none. present: the numbers that occur,
    without 0; None: unknown, because a captured step reads them when it runs.
    wanted: [wanted] int64, the rows whose logits the head computes; None: of all, or of each sequence's last.
    """

    numbers: Tensor
    present: frozenset[int] | None
    wanted: Tensor | None = None
    _by_count: dict[int, Tensor] = field(default_factory=dict)
    _orders: dict[int, Tensor] = field(default_factory=dict)

    @classmethod
    def of_sequences(cls, numbers: Sequence[int], device: torch.device) -> "AdapterRows | None":
        """Returns the rows of a padded pass: one for each sequence. None if none of them has an adapter."""
        present = frozenset(numbers) - {0}
        return cls(to_device(numbers, torch.int32, device), present) if present else None

    def of(self, count: int) -> Tensor:
        """Returns the numbers, [count] int32, for a layer whose input has this many rows.

        They are those of the pass, or those whose logits are wanted; or, of a padded pass, several of each sequence.
        """
        if count == len(self.numbers):
            return self.numbers
        if count not in self._by_count:
            if self.wanted is not None and count == len(self.wanted):
                self._by_count[count] = self.numbers[self.wanted]
            else:
                self._by_count[count] = self.numbers.repeat_interleave(count // len(self.numbers))
        return self._by_count[count]

    def order(self, count: int) -> Tensor:
        """Returns the indices of a layer's rows, sorted by their adapters' numbers: [count] int64."""
        if count not in self._orders:
            self._orders[count] = self.of(count).argsort(stable=True)
        return self._orders[count]


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """One adapter's change of a linear layer of the running model: y = dora_scale * base(x) + b (a x) + bias_delta.

    a: [ranks, inputs], for all layers that the running model computes as one. b: for each of these layers that is
    changed, [its ranks, its outputs]; the layers use the ranks one after another. firsts: the index of the first output
    of each. dora_scale, bias_delta: [outputs] float32, or None for 1 and 0.
    """

    a: Tensor
    b: Sequence[Tensor]
    firsts: Sequence[int]
    dora_scale: Tensor | None
    bias_delta: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(
            tensor.nbytes for tensor in (self.a, *self.b, self.dora_scale, self.bias_delta) if tensor is not None
        )

    def to(self, device: torch.device) -> Self:
        """Returns the delta on another device."""
        dora_scale, bias_delta = (
            None if tensor is None else tensor.to(device) for tensor in (self.dora_scale, self.bias_delta)
        )
        return type(self)(self.a.to(device), [b.to(device) for b in self.b], self.firsts, dora_scale, bias_delta)


class LoraBackend(ABC):
    """Computes the LoRA deltas of one linear layer."""

    @abstractmethod
    def put(self, adapter: int, change: LoraDelta) -> None:
        """Applies the delta to rows with that adapter number, from the next pass on."""

    @abstractmethod
    def drop(self, adapter: int) -> None:
        """Forgets an adapter, if it changes this layer."""

    def warm_up(self, inputs: int, dtype: torch.dtype) -> None:  # noqa: B027
        """Compiles what `apply` needs for this number of inputs, if it compiles anything."""

    @abstractmethod
    def apply(self, x: Tensor, y: Tensor, rows: AdapterRows, *, residual: Tensor | None) -> Tensor:
        """Returns the outputs, [..., outputs], of the layer for x, [..., inputs], each row changed by its adapter.

        y: the base layer's outputs, which are overwritten. residual: [..., outputs], added last.
        """


class TorchLora(LoraBackend):
    """Plain torch, one adapter after the other."""

    def __init__(self) -> None:
        self._deltas: dict[int, LoraDelta] = {}

    def put(self, adapter: int, change: LoraDelta) -> None:
        self._deltas[adapter] = change

    def drop(self, adapter: int) -> None:
        self._deltas.pop(adapter, None)

    def apply(self, x: Tensor, y: Tensor, rows: AdapterRows, *, residual: Tensor | None) -> Tensor:
        inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        numbers = rows.of(len(inputs))
        for adapter in self._deltas.keys() if rows.present is None else rows.present & self._deltas.keys():
            _change(inputs, outputs, (numbers == adapter).nonzero().squeeze(1), self._deltas[adapter])
        return y if residual is None else residual + y


def _change(x: Tensor, y: Tensor, rows: Tensor, change: LoraDelta) -> None:
    """Changes some rows of y, [rows, outputs], in place. x: [rows, inputs]."""
    own = y[rows]
    if change.dora_scale is not None:
        own = own * change.dora_scale.to(y.dtype)
    shrunk = (x[rows] @ change.a.t()).split([len(b) for b in change.b], dim=-1)
    for first, b, sums in zip(change.firsts, change.b, shrunk, strict=True):
        own[:, first : first + b.shape[1]] += sums @ b
    if change.bias_delta is not None:
        own = own + change.bias_delta.to(y.dtype)
    y[rows] = own


class CpuLora(LoraBackend):
    """The engine's CPU kernels, which group rows by adapter. kernel: a `torch.classes.oatmill.Adapters`."""

    def __init__(self, outputs: int) -> None:
        self.kernel: Any = torch.classes.oatmill.Adapters(outputs)

    def put(self, adapter: int, change: LoraDelta) -> None:
        self.kernel.put(adapter, change.a, list(change.b), list(change.firsts), change.dora_scale, change.bias_delta)

    def drop(self, adapter: int) -> None:
        self.kernel.drop(adapter)

    def apply(self, x: Tensor, y: Tensor, rows: AdapterRows, *, residual: Tensor | None) -> Tensor:
        changed: Tensor = self.kernel.apply(x, y, rows.of(x.numel() // x.shape[-1]))
        return changed if residual is None else residual + changed


class AdaptedLinear:
    """The place of LoRA deltas at a linear layer of a running model.

    parts: the layers of the base model whose outputs it has side by side, with their numbers of outputs.
    """

    def __init__(self, parts: Sequence[tuple[str, int]], inputs: int, backend: LoraBackend) -> None:
        self.parts = parts
        self.inputs = inputs
        self.outputs = sum(outputs for _, outputs in parts)
        self._backend = backend
        self._changed_by: set[int] = set()

    def put(self, adapter: int, change: LoraDelta) -> None:
        """Applies the delta to rows with that adapter number, from the next pass on."""
        self._changed_by.add(adapter)
        self._backend.put(adapter, change)

    def drop(self, adapter: int) -> None:
        self._changed_by.discard(adapter)
        self._backend.drop(adapter)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles what passes with adapters need."""
        self._backend.warm_up(self.inputs, dtype)

    def changes(self, rows: AdapterRows) -> bool:
        """Returns True if an adapter of these rows changes this layer."""
        return rows.present is None or not self._changed_by.isdisjoint(rows.present)

    def apply(self, x: Tensor, y: Tensor, rows: AdapterRows, *, residual: Tensor | None = None) -> Tensor:
        """Returns the changed outputs, as LoraBackend.apply does. y: the layer's own outputs."""
        return self._backend.apply(x, y.contiguous(), rows, residual=residual)
