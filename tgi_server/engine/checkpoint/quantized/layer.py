"""A linear layer whose weight stays quantised, in plain torch, for devices and formats without a kernel."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from tgi_server.engine.checkpoint.quantized.weight import QuantizedWeight, by_pieces

# Numbers of the weight that are dense at a time: few fit a cache and stay in memory that is used again, many take few
# calls.
_DENSE_AT_ONCE = 1 << 19


def plain_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Returns a linear layer with a weight, [out_features, in_features], and a bias, which do not change."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class QuantizedLinear(nn.Module):
    """y = x W^T + b with W as its checkpoint has it; parts of it become dense while they are needed.

    It takes the place of a plain layer before there are weights, and holds one once it was `filled`.
    """

    quantized: QuantizedWeight

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.bias = plain.bias
        self._dense_dtype = plain.weight.dtype

    @property
    def weight(self) -> Tensor:
        """The dense weight, computed at every call, for models that read it themselves. Only a shape before `fill`."""
        if "quantized" not in self.__dict__:
            return torch.empty(self.out_features, self.in_features, dtype=self._dense_dtype, device="meta")
        return self.quantized.dense(self._dense_dtype)

    def fill(self, weight: QuantizedWeight) -> None:
        """Takes the weight, [out_features, in_features]."""
        self.quantized = weight.apply(Tensor.contiguous)
        self._group_size, self._on_a_line = weight.group_size, weight.on_a_line

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weights of some outputs, [rows, in_features]. indices: [rows] int64."""
        return self._dense(indices, dtype)

    def unpacked(self) -> nn.Linear:
        """Returns the plain linear layer that this one replaced."""
        return plain_linear(self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        """The size of the weight."""
        return sum(tensor.nbytes for tensor in self.quantized.tensors())

    def forward(self, x: Tensor) -> Tensor:
        """Returns y, [..., out_features], for x, [..., in_features]."""
        if x.device.type == "cpu":
            return torch.cat(by_pieces(partial(self._part, x), self._parts()), -1)
        return torch.cat([self._part(x, part) for part in self._parts()], -1)

    def _parts(self) -> Sequence[tuple[int, int]]:
        size = max(1, _DENSE_AT_ONCE // self.in_features)
        return [(first, min(first + size, self.out_features)) for first in range(0, self.out_features, size)]

    def _part(self, x: Tensor, part: tuple[int, int]) -> Tensor:
        first, last = part
        bias = None if self.bias is None else self.bias[first:last]
        return linear(x, self._dense(slice(first, last), x.dtype), bias)

    def _dense(self, index: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return self.quantized.rows(index).dense(dtype, self._group_size, on_a_line=self._on_a_line)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Changes the weight with the parameters, as `to` does."""
        if "quantized" in self.__dict__:
            self.quantized = self.quantized.apply(fn)
        return super()._apply(fn, recurse)


class QuantizedEmbedding(nn.Module):
    """An embedding whose weight stays quantised; its rows become dense as they are looked up.

    layer: has the weight, [tokens, size]: the head of a model that ties the two, which is arranged for the head's
    kernels, or a layer of its own. scale: rows are multiplied by it.
    """

    weight: Tensor

    def __init__(self, size: tuple[int, int], dtype: torch.dtype, scale: float, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = size
        self.scale = float(torch.tensor(scale, dtype=dtype, device="cpu"))  # rounded as `transformers` rounds it
        tokens, features = size
        # empty: some models of `transformers` ask for its dtype
        self.register_buffer("weight", torch.empty(0, dtype=dtype, device="meta"), persistent=False)
        linear = nn.Linear(features, tokens, bias=False, dtype=dtype, device="meta") if layer is None else None
        self.own = None if linear is None else QuantizedLinear(linear)
        self._tied = (layer,)  # in a tuple, since it is not a part of this module

    @property
    def layer(self) -> Any:
        return self._tied[0] if self.own is None else self.own

    def tie(self, layer: nn.Module) -> None:
        """Looks up rows in a layer that is a part of another module."""
        self._tied, self.own = (layer,), None

    @classmethod
    def fits(cls, module: nn.Module) -> bool:
        """Returns True for an embedding that does no more than look up rows, and perhaps scale them."""
        return type(module) is nn.Embedding or (
            isinstance(module, nn.Embedding) and hasattr(module, "scalar_embed_scale")
        )

    @classmethod
    def of(cls, plain: Any, head: nn.Module | None = None) -> "QuantizedEmbedding":
        """Returns an embedding without a weight yet. head: the layer that has the same weight; None: there is none."""
        scale = float(getattr(plain, "scalar_embed_scale", 1.0))
        return cls(tuple(plain.weight.shape), plain.weight.dtype, scale, head)

    def unscaled(self) -> "QuantizedEmbedding":
        """Returns an embedding without the scale that shares the layer."""
        made = QuantizedEmbedding((self.num_embeddings, self.embedding_dim), self.weight.dtype, 1.0, self.layer)
        made.weight = self.weight
        return made

    def forward(self, token_ids: Tensor) -> Tensor:
        """Returns embeddings, [..., size]. token_ids: [...] int64."""
        ids, dtype = token_ids.flatten(), self.weight.dtype
        layer: Any = self.layer
        rows: Tensor = layer.weight[ids].to(dtype) if isinstance(layer, nn.Linear) else layer.rows(ids, dtype)
        rows = rows.view(*token_ids.shape, self.embedding_dim)
        return rows if self.scale == 1 else rows * self.scale
