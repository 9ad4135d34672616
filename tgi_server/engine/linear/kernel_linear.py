"""The common part of all linear layers that the engine's own kernels compute."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tgi_server.engine.checkpoint.stored_weights import copy_of_stored
from tgi_server.engine.kernels import structure
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.kernel_table import KernelTable

# Outputs that the engine's own kernels compute together (`kernels/cpu/gemm/gemm.h`).
TILE = 48


class KernelLinear(PackedLinear):
    """y = x W^T + b by a `torch.classes.oatmill.Linear`, which `_pack` makes with `_set`. y has the dtype of x.

    Objects of `torch.classes` cannot be pickled, so a copy creates new ones.
    """

    _layer: Any

    def _set(
        self,
        packed: Tensor,
        bias: Tensor | None,
        kernels: KernelTable | None,
        known: Sequence[str],
        *,
        scales: Tensor | None = None,
        compensation: Tensor | None = None,
        quantized: dict[str, Any] | None = None,
    ) -> None:
        """Sets the layer that computes.

        known: the kernels for these weights; the first one is used if `kernels` is None. scales and compensation: for
        8-bit weights, a number for each output, padded. quantized: members of a
        `torch.classes.oatmill.QuantizedWeights`; None: the weights are not quantized in groups.
        """
        self._table = kernels or KernelTable.of(known[0])
        self._packed = packed
        self._bias = None if bias is None else padded(bias)
        self._parts = scales, compensation, quantized
        self._make()

    def _make(self) -> None:
        scales, compensation, quantized = self._parts
        self._layer = torch.classes.oatmill.Linear(
            self._packed,
            self.in_features,
            self.out_features,
            self._bias,
            scales,
            compensation,
            list(self._table.kernels),
            list(self._table.from_rows),
            None if quantized is None else structure("QuantizedWeights", **quantized),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_layer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if (packed := state.get("_packed")) is not None:  # which may lie in a file, in small pages
            self._packed = copy_of_stored(packed)
        self._make()

    def _plain_bias(self) -> Tensor | None:
        """Returns the bias, [out_features], without what pads it."""
        return None if self._bias is None else self._bias[: self.out_features]

    def kernel(self) -> Any:
        return self._layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._layer.forward(x, None)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        y: Tensor = self._layer.forward(x, residual)
        return y


class SideBySideLinear(KernelLinear):
    """Layers with the same input and different kinds of weights, whose outputs stand side by side."""

    def __init__(self, parts: Sequence[PackedLinear]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = parts[0].in_features, sum(part.out_features for part in parts)
        self.register_buffer("weight", parts[0].weight, persistent=False)
        self.parts = nn.ModuleList(parts)
        self._make()

    def _make(self) -> None:
        parts = cast(Iterable[PackedLinear], self.parts)
        self._layer = torch.classes.oatmill.Linear.side_by_side([part.kernel() for part in parts])

    def _pack(self, weight: Tensor, bias: Tensor | None, kernels: KernelTable | None) -> None:
        raise NotImplementedError("it is made of layers that are packed")

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        dense = [part._dense() for part in cast(Iterable[PackedLinear], self.parts)]
        weight = torch.cat([weight for weight, _ in dense])
        if all(bias is None for _, bias in dense):
            return weight, None
        return weight, torch.cat([weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in dense])


def padded(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns values, [outputs], in a dtype and with zeros up to a whole tile, which the engine's own kernels need."""
    return pad(values.to(dtype), (0, -len(values) % TILE))
