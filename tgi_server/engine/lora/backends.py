"""LoRA deltas of a linear layer, and the backends that compute them: plain torch, and the CPU kernels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from tgi_server.engine.lora.rows import AdapterRows


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """One adapter's change of a linear layer of the running model: y = dora_scale * base(x) + b (a x) + bias_delta.

    a: [ranks, inputs], of all layers that the running model computes as one. b: of each of those that is changed
    [its ranks, its outputs]; they take the ranks in turn. firsts: the place of the first output of each.
    dora_scale, bias_delta: [outputs] float32, or None for 1 and 0.
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
        """Returns the same change on another device."""
        dora_scale, bias_delta = (
            None if each is None else each.to(device) for each in (self.dora_scale, self.bias_delta)
        )
        return type(self)(self.a.to(device), [b.to(device) for b in self.b], self.firsts, dora_scale, bias_delta)


class LoraBackend(ABC):
    """Computes the LoRA deltas of one linear layer."""

    @abstractmethod
    def put(self, number: int, change: LoraDelta) -> None:
        """Has the rows of the adapter with that number computed with its change from the next pass on."""

    @abstractmethod
    def drop(self, number: int) -> None:
        """Forgets an adapter, if it changes this layer."""

    def warm_up(self, inputs: int, dtype: torch.dtype) -> None:  # noqa: B027
        """Compiles what `apply` needs, for x of so many inputs, where something is compiled."""

    @abstractmethod
    def apply(self, x: Tensor, y: Tensor, rows: AdapterRows, *, relu: bool, residual: Tensor | None) -> Tensor:
        """Returns the outputs, [..., outputs], of the layer for x, [..., inputs], each row changed by its adapter.

        y: the base layer's outputs, which are overwritten. relu: the activation comes after the change.
        residual: [..., outputs], added last.
        """


class TorchLora(LoraBackend):
    """Plain torch, one adapter after the other."""

    def __init__(self) -> None:
        self._deltas: dict[int, LoraDelta] = {}

    def put(self, number: int, change: LoraDelta) -> None:
        self._deltas[number] = change

    def drop(self, number: int) -> None:
        self._deltas.pop(number, None)

    def apply(self, x: Tensor, y: Tensor, rows: AdapterRows, *, relu: bool, residual: Tensor | None) -> Tensor:
        inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        numbers = rows.of(len(inputs))
        for number in self._deltas.keys() if rows.present is None else rows.present & self._deltas.keys():
            _change(inputs, outputs, (numbers == number).nonzero().squeeze(1), self._deltas[number])
        if relu:
            torch.relu_(y)
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

    def put(self, number: int, change: LoraDelta) -> None:
        self.kernel.put(number, change.a, list(change.b), list(change.firsts), change.dora_scale, change.bias_delta)

    def drop(self, number: int) -> None:
        self.kernel.drop(number)

    def apply(self, x: Tensor, y: Tensor, rows: AdapterRows, *, relu: bool, residual: Tensor | None) -> Tensor:
        changed: Tensor = self.kernel.apply(x, y, rows.of(x.numel() // x.shape[-1]), relu, residual)
        return changed
