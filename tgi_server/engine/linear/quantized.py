"""Linear layers with weights of 4, 6 or 8 bits that are read as they are, by the engine's own kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from tgi_server.engine.checkpoint.quantized import QuantizedWeight
from tgi_server.engine.checkpoint.quantized.weight import BlockScales
from tgi_server.engine.linear.base import PackedQuantized
from tgi_server.engine.linear.kernel_linear import TILE, KernelLinear
from tgi_server.engine.linear.kernel_table import KernelTable

# Codes that are packed together, by their bits: as many as one 32-bit word holds, or three words for 6 bits.
_OF_UNIT = {4: 8, 6: 16, 8: 4}
# The kind of int8 weights that need 6 bits only.
SIX_BITS = "int6"
# Inputs are padded to a multiple of this, so that every kernel can take a layer.
_UNIT = 32
_ZERO_POINT = 8  # of integers of 4 bits


class PackedQuantizedLinear(PackedQuantized, KernelLinear):
    """y = x W^T + b with W quantized: a scale and maybe a zero point for each group of inputs."""

    def _pack(self, weight: QuantizedWeight, bias: Tensor | None, kernels: KernelTable | None) -> None:  # type: ignore[override]
        weight = weight.compact()
        self.kind = packed_kind_of(weight)
        self._bits = 6 if self.kind == SIX_BITS else 8 if weight.codebook is None else 4
        self._codebook, self._groups = weight.codebook, weight.groups
        self._scale_factors: Tensor | None = None
        self._offset_factors: Tensor | None = None
        self._offsets: Tensor | None = None
        self._zeros: Tensor | None = None
        self._zero = 0
        if (zero := _zero_of_blocks(weight)) is None:
            self._pack_scales(weight)
        else:
            self._zero = zero - (_ZERO_POINT if self.kind == "int4" else 0)
            self._scales, self._scale_factors = _blocks_by_tile(weight.stored_scales)
            if weight.stored_offsets is not None:
                self._offsets, self._offset_factors = _blocks_by_tile(weight.stored_offsets)
        self._order, starts = _arrangement(weight, _OF_UNIT[self._bits])
        packed = torch.ops.oatmill.quantized_pack(weight.codes.view(torch.uint8), self._order, self._bits)
        by_kind = {
            "kind": self.kind,
            "starts": starts,
            "scales": self._scales,
            "offsets": self._offsets,
            "zeros": self._zeros,
            "codebook": self._codebook if self.kind == "codebook" else None,
            "order": None if _keeps_order(self._order, self.in_features) else self._order,
            "scale_factors": self._scale_factors,
            "offset_factors": self._offset_factors,
            "zero": self._zero,
        }
        self._set(packed, bias, kernels, torch.ops.oatmill.quantized_kernels(self.kind), quantized=by_kind)

    def _pack_scales(self, weight: QuantizedWeight) -> None:
        zeros, scales, offsets = weight.zeros, weight.scales, weight.offsets
        if self.kind == "int4":  # integers from -8 to 7
            zeros = (torch.zeros_like(scales) if zeros is None else zeros) - _ZERO_POINT
        self._scales = _by_tile(narrowed(scales))
        if offsets is not None:  # into which zeros are merged
            self._offsets = _by_tile(offsets if zeros is None else offsets - zeros * scales)
        elif zeros is not None and bool(zeros.any()):
            largest = _ZERO_POINT if self.kind == "int4" else 127
            small = zeros.clamp(-largest, largest).to(torch.int8)
            if torch.equal(small.float(), zeros):
                self._zeros = _by_tile(small)
            else:
                self._offsets = _by_tile(-zeros * scales)

    def rows(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the weights of some outputs, [rows, in_features]. indices: [rows] int64."""
        found: Tensor = self._layer.rows(indices, dtype)
        return found

    def _dense(self) -> tuple[Tensor, Tensor | None]:
        shape = self.out_features, self.in_features
        codes = torch.ops.oatmill.quantized_unpack(self._packed, self._order, *shape, self._bits)
        if self.kind == "codebook":
            assert self._codebook is not None
            numbers = self._codebook[codes.long()]
        elif self.kind == "int4":
            numbers = codes.float() - _ZERO_POINT
        else:
            numbers = codes.view(torch.float8_e4m3fn if self.kind == "fp8" else torch.int8).float()
        scales = self._by_input(_product(self._scales, self._scale_factors))
        if self._zeros is not None:
            numbers -= self._by_input(self._zeros.float())
        dense = (numbers - self._zero) * scales
        if self._offsets is not None:
            dense += self._by_input(_product(self._offsets, self._offset_factors))
        return dense.to(self.weight.dtype), self._plain_bias()

    def _by_input(self, by_tile: Tensor) -> Tensor:
        """Returns [outputs, inputs] of what `_by_tile` made."""
        return by_tile.transpose(1, 2).flatten(0, 1)[: self.out_features, self._groups]


def kind_of(weight: QuantizedWeight) -> str:
    """Returns the name of this kind of weights."""
    if weight.codebook is not None:
        return "int4" if weight.on_a_line else "codebook"
    return "int8" if weight.codes.dtype == torch.int8 else "fp8"


def packed_kind_of(weight: QuantizedWeight) -> str:
    """Returns the name of the kind that weights have once they are packed for CPUs."""
    return SIX_BITS if weight.six_bits else kind_of(weight)


def _arrangement(weight: QuantizedWeight, of_unit: int) -> tuple[Tensor, Tensor]:
    """Arranges inputs so that those of a group follow each other and begin at a multiple of the unit.

    Returns the input that stands at each place, -1 for none, and the unit with which each group begins, followed by the
    number of units; both int32.
    """
    order: list[Tensor] = []
    starts, size = [], 0
    for group in weight.groups.argsort(stable=True).split(weight.groups.bincount().tolist()):
        starts.append(size // of_unit)
        order.append(pad(group, (0, -len(group) % of_unit), value=-1))
        size += len(order[-1])
    order.append(torch.full((-size % _UNIT,), -1))
    places = torch.cat(order).to(torch.int32)
    return places, torch.tensor([*starts, len(places) // of_unit], dtype=torch.int32)


def _keeps_order(order: Tensor, inputs: int) -> bool:
    """Returns True if the order keeps all inputs at their indices, with the padding after them."""
    return torch.equal(order[:inputs], torch.arange(inputs, dtype=torch.int32))


def narrowed(scales: Tensor) -> Tensor:
    """Returns scales in 16 bits if these hold them, as in most checkpoints: less is read."""
    for dtype in (torch.float16, torch.bfloat16):
        narrow = scales.to(dtype)
        if torch.equal(narrow.float(), scales):
            return narrow
    return scales


def _zero_of_blocks(weight: QuantizedWeight) -> int | None:
    """Returns the common zero of all groups if scales are in blocks that the kernels read; None otherwise."""
    scales, offsets, zeros = weight.stored_scales, weight.stored_offsets, weight.zeros
    if not isinstance(scales, BlockScales) or not (offsets is None or isinstance(offsets, BlockScales)):
        return None
    per_block, rest = divmod(scales.factors.shape[1], scales.blocks.shape[1])
    if rest or per_block & (per_block - 1):
        return None
    zero = 0.0 if zeros is None else float(zeros.flatten()[0])
    return int(zero) if zero == int(zero) and (zeros is None or bool((zeros == zero).all())) else None


def _blocks_by_tile(scales: Any) -> tuple[Tensor, Tensor]:
    return _by_tile(scales.blocks.half()), _by_tile(scales.factors)


def _product(scales: Tensor, factors: Tensor | None) -> Tensor:
    """Returns scales or offsets, [tiles, groups, TILE], in float32."""
    if factors is None:
        return scales.float()
    return scales.float().repeat_interleave(factors.shape[1] // scales.shape[1], 1) * factors.float()


def _by_tile(values: Tensor) -> Tensor:
    """Returns [tiles, groups, TILE] of [outputs, groups], with zeros for the outputs that a tile lacks."""
    outputs, groups = values.shape
    whole = pad(values, (0, 0, 0, -outputs % TILE))
    return whole.view(-1, TILE, groups).transpose(1, 2).contiguous()
