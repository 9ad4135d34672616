"""The one representation of a quantised weight: codes, and what makes numbers of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

# The number of codes of 4 bits.
CODES = 16
# The codebook of weights whose codes are numbers already.
LINE = torch.arange(CODES, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight W, [outputs, inputs], W[n, k] = (number(codes[n, k]) - zeros[n, g]) * scales[n, g] + offsets[n, g].

    codes: [outputs, inputs] int8 or float8_e4m3fn, which are numbers themselves; or [outputs, inputs / 2] uint8, each
    two codes of 4 bits, as `paired` makes them, which choose from the codebook.
    codebook: [16] float32, with codes of 4 bits only.
    scales: [outputs, groups] float32. zeros: the same, or None where all are 0.
    offsets: the same, for formats that add to the product. An offset has a scale that is not 0.
    groups: [inputs] int64, the group g of each input k, in any order.
    """

    codes: Tensor
    codebook: Tensor | None
    scales: Tensor
    zeros: Tensor | None
    groups: Tensor
    offsets: Tensor | None = None

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        *,
        codebook: Tensor | None = None,
        groups: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Self:
        """Makes groups of equal size where none are given, and leaves out zeros and offsets that are all 0.

        Groups have to be given for an odd number of inputs in 4 bits.
        """
        if groups is None:
            inputs, count = codes.shape[1] * (1 if codebook is None else 2), scales.shape[1]
            groups = torch.arange(inputs) // -(-inputs // count)
        if zeros is not None:
            zeros = zeros.float() if bool(zeros.any()) else None
        if offsets is not None:
            offsets = offsets.float() if bool(offsets.any()) else None
        return cls(codes, codebook, scales.float(), zeros, groups.long(), offsets)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), len(self.groups)

    @property
    def single_codes(self) -> Tensor:
        """The codes, each in a byte of its own: [outputs, inputs] uint8."""
        if self.codebook is None:
            return self.codes.view(torch.uint8)
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)[:, : len(self.groups)]

    @property
    def on_a_line(self) -> bool:
        """True if the codes are whole numbers, so that no codebook has to be read."""
        return self.codebook is None or torch.equal(self.codebook.cpu(), LINE)

    @property
    def group_size(self) -> int | None:
        """The inputs of a group, where groups of equal size follow each other; else None."""
        inputs = torch.arange(len(self.groups), device=self.groups.device)
        size, rest = divmod(len(inputs), self.scales.shape[1])
        return size if size and not rest and torch.equal(self.groups, inputs // size) else None

    def dense(
        self, dtype: torch.dtype = torch.float32, group_size: int | None = None, *, on_a_line: bool = False
    ) -> Tensor:
        """Returns W, computed in float32 and rounded once: [outputs, inputs].

        It is faster for who knows the `group_size`, and that the codes are numbers, `on_a_line`.
        """
        if self.codebook is None:
            numbers = self.codes.float()
        else:
            numbers = self.single_codes.float() if on_a_line else self.codebook[self.single_codes.long()]
        if group_size is None:
            if self.zeros is not None:
                numbers -= self.zeros[:, self.groups]
            numbers *= self.scales[:, self.groups]
            if self.offsets is not None:
                numbers += self.offsets[:, self.groups]
        else:
            by_group = numbers.unflatten(1, (-1, group_size))
            if self.zeros is not None:
                by_group -= self.zeros.unsqueeze(2)
            by_group *= self.scales.unsqueeze(2)
            if self.offsets is not None:
                by_group += self.offsets.unsqueeze(2)
        return numbers.to(dtype)

    def outputs(self, ranges: Sequence[range]) -> Self:
        """Returns the weight of some outputs."""
        if _is_all(ranges, self.shape[0]):
            return self
        zeros, offsets = (None if each is None else taken(each, ranges, 0) for each in (self.zeros, self.offsets))
        codes, scales = taken(self.codes, ranges, 0), taken(self.scales, ranges, 0)
        return replace(self, codes=codes, scales=scales, zeros=zeros, offsets=offsets)

    def inputs(self, ranges: Sequence[range]) -> Self:
        """Returns the weight of some inputs. It has the groups of all inputs, also those that lost all of theirs."""
        if _is_all(ranges, self.shape[1]):
            return self
        codes = taken(self.codes if self.codebook is None else self.single_codes, ranges, 1)
        codes = codes if self.codebook is None else paired(codes)
        return replace(self, codes=codes, groups=taken(self.groups, ranges, 0))

    def reordered(self, order: Tensor) -> Self:
        """Returns the weight of the same inputs in another order. order: [inputs] int64, the input at each place."""
        codes = self.single_codes[:, order]
        codes = codes.view(self.codes.dtype) if self.codebook is None else paired(codes)
        return replace(self, codes=codes, groups=self.groups[order])

    def compact(self) -> Self:
        """Returns the same weight without groups that have no inputs."""
        used, groups = self.groups.unique(return_inverse=True)
        if len(used) == self.scales.shape[1]:
            return self
        zeros, offsets = (None if each is None else each[:, used] for each in (self.zeros, self.offsets))
        return replace(self, scales=self.scales[:, used], zeros=zeros, groups=groups, offsets=offsets)

    def without_offsets(self) -> Self:
        """Returns the same weight, up to the rounding of float32, with zeros in place of offsets."""
        if self.offsets is None:
            return self
        zeros = self.offsets / torch.where(self.scales == 0, torch.ones_like(self.scales), self.scales)
        return replace(self, zeros=(0 if self.zeros is None else self.zeros) - zeros, offsets=None)

    def joins(self, other: "QuantizedWeight") -> bool:
        """Returns True if both can stand in one weight: they are of the same kind, or can be widened to 8 bits."""
        return self._is_like(other) or (self._widens(other.shape[1]) and other._widens(self.shape[1]))

    def _is_like(self, other: "QuantizedWeight") -> bool:
        """Returns True if both have the same kind of codes, and the same groups."""
        return (
            self.codes.dtype == other.codes.dtype
            and (self.codebook is None or (other.codebook is not None and torch.equal(self.codebook, other.codebook)))
            and torch.equal(self.groups, other.groups)
        )

    def _widens(self, inputs: int) -> bool:
        """Returns True if the numbers of the codes, of so many inputs, are integers of 8 bits in groups of one size."""
        if self.shape[1] != inputs or self.group_size is None:
            return False
        book = self.codebook
        return self.codes.dtype == torch.int8 if book is None else bool((book == book.to(torch.int8).float()).all())

    def _widened(self, group_size: int) -> Self:
        """Returns the same weight in 8 bits and groups of that size, which divides that of its own."""
        codes = self.codes
        if self.codebook is not None:
            codes = self.codebook.to(torch.int8)[self.single_codes.long()]
        repeats = (self.group_size or 0) // group_size
        scales = self.scales.repeat_interleave(repeats, 1)
        zeros, offsets = (
            None if each is None else each.repeat_interleave(repeats, 1) for each in (self.zeros, self.offsets)
        )
        groups = torch.arange(self.shape[1], device=self.groups.device) // group_size
        return replace(self, codes=codes, codebook=None, scales=scales, zeros=zeros, groups=groups, offsets=offsets)

    @classmethod
    def joined(cls, weights: Sequence["QuantizedWeight"]) -> Self:
        """Returns the weight that gives the outputs of all these, side by side."""
        if not all(weights[0]._is_like(weight) for weight in weights):
            group_size = math.gcd(*(weight.group_size or 1 for weight in weights))
            weights = [weight._widened(group_size) for weight in weights]
        first = weights[0]
        by_group = [weight.scales for weight in weights]
        zeros = _joined_or_none([weight.zeros for weight in weights], by_group)
        offsets = _joined_or_none([weight.offsets for weight in weights], by_group)
        codes = torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(first.codes.dtype)
        scales = torch.cat(by_group)
        return cls(codes, first.codebook, scales, zeros, first.groups, offsets)


def _joined_or_none(parts: Sequence[Tensor | None], scales: Sequence[Tensor]) -> Tensor | None:
    """Returns the parts, one below the other, with zeros of the shape of its scales for one that is None."""
    if all(part is None for part in parts):
        return None
    whole = zip(parts, scales, strict=True)
    return torch.cat([torch.zeros_like(like) if part is None else part for part, like in whole])


def paired(codes: Tensor) -> Tensor:
    """Returns codes of 4 bits, [outputs, n] uint8, as pairs in a byte, the first in the low bits: [outputs, n / 2]."""
    whole = pad(codes, (0, codes.shape[1] % 2))
    return whole[:, ::2] | whole[:, 1::2] << 4


def _is_all(ranges: Sequence[range], size: int) -> bool:
    return len(ranges) == 1 and ranges[0] == range(size)


def taken(tensor: Tensor, ranges: Sequence[range], axis: int) -> Tensor:
    """Returns parts of a tensor along an axis, with zeros behind its end."""
    raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    size = raw.shape[axis]
    parts = [raw.narrow(axis, each.start, max(0, min(each.stop, size) - each.start)) for each in ranges]
    missing = sum(map(len, ranges)) - sum(part.shape[axis] for part in parts)
    if missing:
        shape = list(raw.shape)
        shape[axis] = missing
        parts.append(raw.new_zeros(shape))
    return torch.cat(parts, axis).view(tensor.dtype)
