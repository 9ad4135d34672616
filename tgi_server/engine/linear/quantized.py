"""Linear layers with weights of 4 or 8 bits that are read as they are, by the engine's own kernels."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.linear.base import PackedQuantized
from tgi_server.engine.linear.kernel_linear import TILE, KernelLinear
from tgi_server.engine.linear.kernel_table import KernelTable

_WORD_BITS = 32
# Inputs are padded to a multiple of this, so that every kernel can take a layer.
_UNIT = 32
_ZERO_POINT = 8  # of integers of 4 bits


class PackedQuantizedLinear(PackedQuantized, KernelLinear):
    """y = x W^T + b with W quantized: a scale and maybe a zero point for each group of inputs."""

    def _pack(self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable | None) -> None:  # type: ignore[override]
        weight = weight.compact()
        self.kind = kind_of(weight)
        self._bits = 8 if weight.codebook is None else 4
        self._codebook, self._groups = weight.codebook, weight.groups
        zeros = weight.zeros
        if self.kind == "int4":  # integers from -8 to 7
            zeros = (torch.zeros_like(weight.scales) if zeros is None else zeros) - _ZERO_POINT
        self._offsets, self._zeros = None, None
        if weight.offsets is not None:  # which take the zeros in
            self._offsets = _by_tile(weight.offsets if zeros is None else weight.offsets - zeros * weight.scales)
        elif zeros is not None and bool(zeros.any()):
            largest = _ZERO_POINT if self.kind == "int4" else 127
            small = zeros.clamp(-largest, largest).to(torch.int8)
            if torch.equal(small.float(), zeros):
                self._zeros = _by_tile(small)
            else:
                self._offsets = _by_tile(-zeros * weight.scales)
        self._order, starts = _arrangement(weight, _WORD_BITS // self._bits)
        packed = torch.ops.oatmill.quantized_pack(weight.codes.view(torch.uint8), self._order, self._bits)
        self._scales = _by_tile(narrowed(weight.scales))
        by_kind = torch.classes.oatmill.QuantizedWeights(
            self.kind,
            starts,
            self._scales,
            self._offsets,
            self._zeros,
            self._codebook if self.kind == "codebook" else None,
            None if _keeps_order(self._order, self.in_features) else self._order,
        )
        self._set(packed, bias, kernels, torch.ops.oatmill.quantized_kernels(self.kind), quantized=by_kind)

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        shape = self.out_features, self.in_features
        codes = torch.ops.oatmill.quantized_unpack(self._packed, self._order, *shape, self._bits)
        if self.kind == "codebook":
            assert self._codebook is not None
            numbers = self._codebook[codes.long()]
        elif self.kind == "int4":
            numbers = codes.float() - _ZERO_POINT
        else:
            numbers = codes.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn).float()
        scales = self._by_input(self._scales.float())
        if self._zeros is not None:
            numbers -= self._by_input(self._zeros.float())
        dense = numbers * scales
        if self._offsets is not None:
            dense += self._by_input(self._offsets)
        return dense.to(self.weight.dtype), self._plain_bias()

    def _by_input(self, by_tile: Tensor) -> Tensor:
        """Returns [outputs, inputs] of what `_by_tile` made."""
        return by_tile.transpose(1, 2).flatten(0, 1)[: self.out_features, self._groups]


def kind_of(weight: QuantizedWeight) -> str:
    """Returns the kernels' name for weights of this kind."""
    if weight.codebook is not None:
        return "int4" if weight.on_a_line else "codebook"
    return "int8" if weight.codes.dtype == torch.int8 else "fp8"


def _arrangement(weight: QuantizedWeight, of_word: int) -> tuple[Tensor, Tensor]:
    """Arranges inputs so that those of a group follow each other and begin a word.

    of_word: codes of a word. Returns the input that stands at each place, -1 for none, and the word with which each
    group begins, followed by the number of words; both int32.
    """
    order: list[Tensor] = []
    starts, size = [], 0
    for group in weight.groups.argsort(stable=True).split(weight.groups.bincount().tolist()):
        starts.append(size // of_word)
        order.append(pad(group, (0, -len(group) % of_word), value=-1))
        size += len(order[-1])
    order.append(torch.full((-size % _UNIT,), -1))
    places = torch.cat(order).to(torch.int32)
    return places, torch.tensor([*starts, len(places) // of_word], dtype=torch.int32)


def _keeps_order(order: Tensor, inputs: int) -> bool:
    """Returns True if all inputs stand where they were, and what is empty stands behind them."""
    return torch.equal(order[:inputs], torch.arange(inputs, dtype=torch.int32))


def narrowed(scales: Tensor) -> Tensor:
    """Returns the same numbers in 16 bits where these hold them, as those of most checkpoints do: less is read."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales


def _by_tile(values: Tensor) -> Tensor:
    """Returns [tiles, groups, TILE] of [outputs, groups], with zeros for the outputs that a tile lacks."""
    outputs, groups = values.shape
    whole = pad(values, (0, 0, 0, -outputs % TILE))
    return whole.view(-1, TILE, groups).transpose(1, 2).contiguous()
