"""Linear layers, y = x W^T + b: one file for each kind of weights, and the choice among kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.linear.base import PackedLinear
from tgi_server.engine.linear.choice import choose_kernels, own_kernels
from tgi_server.engine.linear.float import FloatLinear
from tgi_server.engine.linear.int8 import Int8Linear
from tgi_server.engine.linear.kernel_table import KernelTable
from tgi_server.engine.linear.onednn import OneDnnLinear
from tgi_server.engine.sharding import ShardGroup

__all__ = ["KernelTable", "LinearFactory", "PackedLinear", "linear_factory"]


@dataclass(frozen=True, slots=True)
class LinearFactory:
    """Makes the linear layers of one model: all of a kind, with the same kernels."""

    layer: type[PackedLinear]
    kernels: KernelTable | None = None

    @property
    def rounding(self) -> float:
        """Returns the share of their norm by which the layers may change a model's logits."""
        return self.layer.rounding

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        return self.layer(weight, bias, self.kernels)

    def joined(self, *linears: nn.Linear) -> PackedLinear:
        return self.layer.joined(*linears, kernels=self.kernels)


def linear_factory(
    model: nn.Module,
    dtype: torch.dtype,
    quantize: str | None,
    *,
    custom_kernels: bool,
    group: ShardGroup | None = None,
    pinned: str | None = None,
) -> LinearFactory:
    """Returns what makes a model's linear layers on a CPU, quantised as asked.

    pinned: the kernels to take, as KernelTable has them as text; None: those that are measured to be the fastest.
    Raises UnsupportedModel when there are none.
    """
    if quantize not in (None, "int8"):
        raise UnsupportedModel(f"--quantize {quantize} is not supported; on a CPU, int8 is")
    if not (custom_kernels and load_kernels()):
        if quantize:
            raise UnsupportedModel("--quantize int8 needs the CPU kernels, which are not available; leave it out")
        return LinearFactory(OneDnnLinear)
    layer = Int8Linear if quantize else FloatLinear
    table = choose_kernels(model, layer, group) if pinned is None else _pinned(pinned, layer, dtype)
    if table.onednn:
        return LinearFactory(OneDnnLinear)
    return LinearFactory(layer, table)


def _pinned(text: str, layer: type[FloatLinear], dtype: torch.dtype) -> KernelTable:
    try:
        table = KernelTable.of(text)
    except ValueError as error:
        raise UnsupportedModel(f"--linear-kernels: {error}") from error
    known = own_kernels(layer, dtype) + ([] if layer is Int8Linear else ["onednn"])
    if unknown := [name for name in table.kernels if name not in known]:
        raise UnsupportedModel(
            f"--linear-kernels: this CPU has no {', '.join(unknown)} for these weights; it has {', '.join(known)}"
        )
    return table
