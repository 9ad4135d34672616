"""Linear layers of `transformers` as they are, for models that are computed in plain torch."""

from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.checkpoint.quantized import QuantizedLinear
from tgi_server.engine.linear import LinearFactory
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.blas import BlasLinear


class ModulesLinear(PackedLinear):
    """The outputs of some layers with the same input, side by side."""

    def __init__(self, *modules: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = modules[0].in_features, sum(each.out_features for each in modules)
        self.register_buffer("weight", modules[0].weight.new_empty(0), persistent=False)
        self.layers = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [layer(x) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)

    def _pack(self, *_: Any) -> None:
        raise NotImplementedError("it is made of layers")

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        raise NotImplementedError("it is made of layers")


class ModulesFactory(LinearFactory):
    """Makes layers of those of `transformers` without a copy of their weights, also of quantized ones."""

    def __init__(self) -> None:
        super().__init__(BlasLinear)

    def takes(self, module: nn.Module) -> bool:
        return type(module) is nn.Linear or isinstance(module, QuantizedLinear)

    def merges(self, *modules: nn.Module) -> bool:
        return all(map(self.takes, modules))

    def __call__(self, module: Any) -> PackedLinear:
        return ModulesLinear(module)

    def joined(self, *modules: Any) -> PackedLinear:
        return ModulesLinear(*modules)
