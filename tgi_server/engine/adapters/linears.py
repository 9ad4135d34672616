"""The linear layers of a running model, and what adapters change of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.adapters.adapter import AdapterLayer
from tgi_server.engine.adapters.rows import AdapterRows, CurrentRows
from tgi_server.engine.layers.decoder import FusedLayer, LayerStack
from tgi_server.engine.linear import PackedLinear
from tgi_server.engine.quantization import QuantizedLinear

# Layers of which a mixture gives each only some of the rows: which rows those are, nobody knows outside.
_OF_EXPERTS = ".experts."


@dataclass(frozen=True, slots=True)
class Change:
    """One adapter's change of a linear layer of the running model: y = gain * base(x) + b (a x) + shift.

    a: [ranks, inputs], of all layers that the running model computes as one. b: of each of those that is changed
    [its ranks, its outputs]; they take the ranks in turn. firsts: the place of the first output of each.
    gain, shift: [outputs] float32, or None for 1 and 0.
    """

    a: Tensor
    b: list[Tensor]
    firsts: list[int]
    gain: Tensor | None
    shift: Tensor | None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.a, *self.b, self.gain, self.shift) if tensor is not None)


class AdaptedLinear:
    """A linear layer of the running model, with the changes that adapters make to it.

    It stands in for the layer's methods. Passes without an adapter that changes the layer go to the layer itself.

    parts: the layers of the base model whose outputs it has side by side, with their numbers of outputs.
    """

    def __init__(
        self, module: nn.Module, parts: Sequence[tuple[str, int]], current: CurrentRows, *, kernels: bool
    ) -> None:
        """kernels: the engine's own kernels compute the changes."""
        self.parts = parts
        self.outputs = sum(outputs for _, outputs in parts)
        self._current = current
        self._changes: dict[int, Change] = {}
        self._forward: Any = module.forward
        self._add_to: Any = getattr(module, "add_to", None)
        module.forward = self.forward
        if self._add_to is not None:
            module.add_to = self.add_to  # type: ignore[assignment]
        self._kernel: Any = None
        if kernels:
            self._kernel = torch.classes.oatmill.Adapters(self.outputs)
            if isinstance(module, PackedLinear) and (layer := module.kernel()) is not None:
                layer.adapt(self._kernel)

    def change(self, layers: Mapping[str, AdapterLayer], dtype: torch.dtype, device: torch.device) -> Change | None:
        """Returns an adapter's change of this layer; None if it has none. layers: by path, as this shard has them."""
        a, b, firsts, first = [], [], [], 0
        gain, shift = torch.ones(self.outputs), torch.zeros(self.outputs)
        for path, outputs in self.parts:
            layer = layers.get(path)
            if layer is not None:
                a.append(layer.a)
                b.append(layer.b.t().to(device, dtype).contiguous())
                firsts.append(first)
                if layer.gain is not None:
                    gain[first : first + outputs] = layer.gain
                if layer.shift is not None:
                    shift[first : first + outputs] = layer.shift
            first += outputs
        if not a:
            return None
        gains = any(layers[path].gain is not None for path, _ in self.parts if path in layers)
        shifts = any(layers[path].shift is not None for path, _ in self.parts if path in layers)
        return Change(
            torch.cat(a).to(device, dtype).contiguous(),
            b,
            firsts,
            gain.to(device) if gains else None,
            shift.to(device) if shifts else None,
        )

    def put(self, number: int, change: Change) -> None:
        """Has the rows of the adapter with that number computed with its change from the next pass on."""
        self._changes[number] = change
        if self._kernel is not None:
            self._kernel.put(number, change.a, change.b, change.firsts, change.gain, change.shift)

    def drop(self, number: int) -> None:
        self._changes.pop(number, None)
        if self._kernel is not None:
            self._kernel.drop(number)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Returns the outputs, [..., outputs], for x, [..., inputs]. options: those of the layer itself."""
        rows = self._rows()
        if rows is None:
            return self._forward(x, **options)
        return self._changed(x, rows, relu=options.get("activation") == "relu")

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual + forward(x)."""
        rows = self._rows()
        return self._add_to(residual, x) if rows is None else self._changed(x, rows, residual=residual)

    def _rows(self) -> AdapterRows | None:
        """Returns the rows of this pass; None if nothing changes for any of them."""
        rows = self._current.rows
        return None if rows is None or self._changes.keys().isdisjoint(rows.present) else rows

    def _changed(self, x: Tensor, rows: AdapterRows, *, relu: bool = False, residual: Tensor | None = None) -> Tensor:
        y: Tensor = self._forward(x).contiguous()
        numbers = rows.of(x.numel() // x.shape[-1])
        if self._kernel is not None:
            return self._kernel.apply(x, y, numbers, relu, residual)
        inputs, outputs = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        for number in rows.present & self._changes.keys():
            _change(inputs, outputs, (numbers == number).nonzero().squeeze(1), self._changes[number])
        if relu:
            y = torch.relu_(y)
        return y if residual is None else residual + y


def _change(x: Tensor, y: Tensor, rows: Tensor, change: Change) -> None:
    """Changes some rows of y, [rows, outputs], in place. x: [rows, inputs]."""
    own = y[rows]
    if change.gain is not None:
        own = own * change.gain.to(y.dtype)
    narrowed = (x[rows] @ change.a.t()).split([len(b) for b in change.b], dim=-1)
    for first, b, sums in zip(change.firsts, change.b, narrowed, strict=True):
        own[:, first : first + b.shape[1]] += sums @ b
    if change.shift is not None:
        own = own + change.shift.to(y.dtype)
    y[rows] = own


def adapt_linears(model: nn.Module, current: CurrentRows, *, kernels: bool) -> list[AdaptedLinear]:
    """Makes all linear layers of a model such that adapters can change them.

    current: set before each pass. kernels: the engine's own kernels compute the changes, on a CPU.
    """
    for module in model.modules():
        if isinstance(module, LayerStack):
            module.adapter_numbers = current.numbers
    return [AdaptedLinear(module, parts, current, kernels=kernels) for module, parts in list(_linears(model))]


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[str, int]]]]:
    """Yields each linear layer with the layers of the base model that it is made of, and their numbers of outputs."""
    fused: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, LayerStack):
            parent = path.rpartition(".")[0]
            layers = [(f"{parent}.{index}", layer) for index, layer in enumerate(module.layers)]
        elif isinstance(module, FusedLayer):
            layers = [(path, module)]
        else:
            layers = []
            if _is_linear(module) and id(module) not in fused and _OF_EXPERTS not in path:
                yield module, [(path.removesuffix(".inner"), _outputs(module))]
        for place, layer in layers:
            for linear, parts in layer.linears():
                fused.add(id(linear))
                yield linear, [(f"{place}.{name}", outputs) for name, outputs in parts]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D | QuantizedLinear | PackedLinear)


def _outputs(module: Any) -> int:
    return int(module.nf if isinstance(module, Conv1D) else module.out_features)
