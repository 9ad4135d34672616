"""The linear layers of a running model, with the changes that adapters make to them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tgi_server.engine.backends.layer import DecoderLayer
from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.linear import PackedLinear
from tgi_server.engine.lora.adapter import AdapterLayer
from tgi_server.engine.lora.backends import CpuLora, LoraBackend, LoraDelta
from tgi_server.engine.lora.rows import AdapterRows, CurrentRows

# Layers of which a mixture gives each only some of the rows: which rows those are, nobody knows outside.
_OF_EXPERTS = ".experts."
# Layers whose weight the model reads without calling them, of Mamba; and those that choose experts.
_NOT_FOR_ROWS = (".dt_proj", ".router")


class AdaptedLinear:
    """Stands in for the methods of a linear layer. Passes in which no adapter changes it go to the layer itself.

    parts: the layers of the base model whose outputs it has side by side, with their numbers of outputs.
    inputs, outputs: its sizes.
    """

    def __init__(
        self, module: nn.Module, parts: Sequence[tuple[str, int]], current: CurrentRows, products: LoraBackend
    ) -> None:
        """current: the rows of the pass that runs. products: computes the changes."""
        self.parts = parts
        self.inputs = _inputs(module)
        self.outputs = sum(outputs for _, outputs in parts)
        self._current = current
        self._products = products
        self._changed_by: set[int] = set()
        self._forward: Any = module.forward
        self._add_to: Any = getattr(module, "add_to", None)
        module.forward = self.forward
        if self._add_to is not None:
            module.add_to = self.add_to  # type: ignore[assignment]
        if isinstance(products, CpuLora) and isinstance(module, PackedLinear):
            layer = module.kernel()  # which may be called without Python
            if layer is not None:
                layer.adapt(products.kernel)

    def change(self, layers: Mapping[str, AdapterLayer], dtype: torch.dtype) -> LoraDelta | None:
        """Returns an adapter's change of this layer; None if it has none. layers: by path, as this shard has them."""
        a, b, firsts, first = [], [], [], 0
        dora_scale = bias_delta = None
        for path, outputs in self.parts:
            layer = layers.get(path)
            if layer is not None:
                a.append(layer.a.to(dtype))
                b.append(layer.b.to(dtype).t().contiguous())
                firsts.append(first)
                if layer.dora_scale is not None:
                    dora_scale = torch.ones(self.outputs) if dora_scale is None else dora_scale
                    dora_scale[first : first + outputs] = layer.dora_scale
                if layer.bias_delta is not None:
                    bias_delta = torch.zeros(self.outputs) if bias_delta is None else bias_delta
                    bias_delta[first : first + outputs] = layer.bias_delta
            first += outputs
        return LoraDelta(torch.cat(a), b, firsts, dora_scale, bias_delta) if a else None

    def put(self, number: int, change: LoraDelta) -> None:
        """Has the rows of the adapter with that number computed with its change from the next pass on."""
        self._changed_by.add(number)
        self._products.put(number, change)

    def drop(self, number: int) -> None:
        self._changed_by.discard(number)
        self._products.drop(number)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compiles what passes with adapters need."""
        self._products.warm_up(self.inputs, dtype)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Returns the outputs, [..., outputs], for x, [..., inputs]. options: those of the layer itself."""
        rows = self._rows()
        if rows is None:
            return self._forward(x, **options)
        relu = options.get("activation") == "relu"
        return self._products.apply(x, self._forward(x).contiguous(), rows, relu=relu, residual=None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual + forward(x)."""
        rows = self._rows()
        if rows is None:
            return self._add_to(residual, x)
        return self._products.apply(x, self._forward(x).contiguous(), rows, relu=False, residual=residual)

    def _rows(self) -> AdapterRows | None:
        """Returns the rows of this pass; None if nothing changes for any of them."""
        rows = self._current.rows
        if rows is None or (rows.present is not None and self._changed_by.isdisjoint(rows.present)):
            return None
        return rows


def adapt_linears(
    model: nn.Module, current: CurrentRows, products: Callable[[int, int], LoraBackend]
) -> list[AdaptedLinear]:
    """Makes all linear layers of a model such that adapters can change them.

    current: set before each pass. products: makes what computes the changes of a layer of so many outputs, of so many
    layers of the base model.
    """
    current.attached = True
    return [
        AdaptedLinear(module, parts, current, products(sum(size for _, size in parts), len(parts)))
        for module, parts in list(_linears(model))
    ]


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[str, int]]]]:
    """Yields each linear layer with the layers of the base model that it is made of, and their numbers of outputs."""
    fused: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, DecoderLayer):
            for linear, parts in module.linears():
                fused.add(id(linear))
                yield linear, [(f"{path}.{name}", outputs) for name, outputs in parts]
        elif _is_linear(module) and id(module) not in fused and _is_called(path):
            yield module, [(path.removesuffix(".inner"), _outputs(module))]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D | QuantizedLinear | PackedLinear)


def _is_called(path: str) -> bool:
    """Returns True for a layer that is called with all rows of a pass."""
    return _OF_EXPERTS not in path and not path.endswith(_NOT_FOR_ROWS)


def _inputs(module: Any) -> int:
    return int(module.weight.shape[0] if isinstance(module, Conv1D) else module.in_features)


def _outputs(module: Any) -> int:
    return int(module.nf if isinstance(module, Conv1D) else module.out_features)
