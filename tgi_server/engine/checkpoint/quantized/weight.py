"""The one representation of a quantised weight: codes, codebook, scales, zeros and offsets."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

# The number of codes of 4 bits.
CODES = 16
# The codebook in which each code stands for its own number.
LINE = torch.arange(CODES, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Scales, [outputs, groups], that are products of the scale of a block of groups and a factor of each group.

    blocks: [outputs, blocks] float32, each exact in float16. factors: [outputs, groups] int8.
    """

    blocks: Tensor
    factors: Tensor

    def expanded(self) -> Tensor:
        """Returns the scales in float32."""
        return self.blocks.repeat_interleave(self.factors.shape[1] // self.blocks.shape[1], 1) * self.factors.float()

    @property
    def has_zeros(self) -> bool:
        """True if a scale is 0."""
        return not (bool(self.factors.all()) and bool(self.blocks.all()))


T = TypeVar("T")
R = TypeVar("R")
Scales = Tensor | BlockScales
# Changes a tensor: takes rows of it, or moves it to a device.
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight W, [outputs, inputs], W[n, k] = (number(codes[n, k]) - zeros[n, g]) * scales[n, g] + offsets[n, g].

    codes: [outputs, inputs] int8 or float8_e4m3fn, which are numbers themselves; or [outputs, inputs / 2] uint8, each
    two codes of 4 bits, as `paired` makes them, which choose from the codebook.
    codebook: [16] float32, with codes of 4 bits only.
    zeros: [outputs, groups] float32, or None where all are 0. groups: [inputs] int64, the group g of each input k, in
    any order.
    stored_scales, stored_offsets: scales and offsets, float32 or in blocks; no offsets: None. Where an offset stands
    beside a scale of 0, the codes are 0.
    six_bits: True if all codes, int8, are from -32 to 31.
    """

    codes: Tensor
    codebook: Tensor | None
    stored_scales: Scales
    zeros: Tensor | None
    groups: Tensor
    stored_offsets: Scales | None = None
    six_bits: bool = False

    @classmethod
    def of(
        cls,
        codes: Tensor,
        scales: Scales,
        zeros: Tensor | None = None,
        *,
        codebook: Tensor | None = None,
        groups: Tensor | None = None,
        offsets: Scales | None = None,
    ) -> Self:
        """Makes groups of equal size where none are given, and leaves out zeros that are all 0.

        Groups have to be given for an odd number of inputs in 4 bits.
        """
        if groups is None:
            of_groups = scales.factors if isinstance(scales, BlockScales) else scales
            inputs, count = codes.shape[1] * (1 if codebook is None else 2), of_groups.shape[1]
            groups = torch.arange(inputs) // -(-inputs // count)
        if zeros is not None:
            zeros = zeros.float() if bool(zeros.any()) else None
        scales = scales if isinstance(scales, BlockScales) else scales.float()
        return cls(codes, codebook, scales, zeros, groups.long(), offsets)

    @property
    def scales(self) -> Tensor:
        """The scales, [outputs, groups] float32."""
        return _expanded(self.stored_scales)

    @property
    def is_finite(self) -> bool:
        """True if all scales are finite numbers."""
        stored = self.stored_scales
        return bool((stored.blocks if isinstance(stored, BlockScales) else stored).isfinite().all())

    @property
    def offsets(self) -> Tensor | None:
        """The offsets, [outputs, groups] float32, or None."""
        return None if self.stored_offsets is None else _expanded(self.stored_offsets)

    @property
    def _none(self) -> Tensor:
        """Zeros or offsets where all are 0."""
        return torch.zeros(self.shape[0], self.group_count, device=self.groups.device)

    @property
    def group_count(self) -> int:
        scales = self.stored_scales
        return (scales.factors if isinstance(scales, BlockScales) else scales).shape[1]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), len(self.groups)

    def tensors(self) -> list[Tensor]:
        """Returns all tensors that the weight consists of."""
        scales = [
            tensor
            for stored in (self.stored_scales, self.stored_offsets)
            for tensor in ((stored.blocks, stored.factors) if isinstance(stored, BlockScales) else (stored,))
        ]
        tensors = (self.codes, self.codebook, self.zeros, self.groups, *scales)
        return [tensor for tensor in tensors if tensor is not None]

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
        size, rest = divmod(len(inputs), self.group_count)
        return size if size and not rest and torch.equal(self.groups, inputs // size) else None

    def dense(
        self, dtype: torch.dtype = torch.float32, group_size: int | None = None, *, on_a_line: bool = False
    ) -> Tensor:
        """Returns W, computed in float32 and rounded once: [outputs, inputs].

        It is faster with a known `group_size`, and with `on_a_line` if the codes stand for their own numbers.
        """
        if self.codebook is None:
            numbers = self.codes.float()
        else:
            numbers = self.single_codes.float() if on_a_line else self.codebook[self.single_codes.long()]
        scales, offsets = self.scales, self.offsets
        if group_size is None:
            if self.zeros is not None:
                numbers -= self.zeros[:, self.groups]
            numbers *= scales[:, self.groups]
            if offsets is not None:
                numbers += offsets[:, self.groups]
        else:
            by_group = numbers.unflatten(1, (-1, group_size))
            if self.zeros is not None:
                by_group -= self.zeros.unsqueeze(2)
            by_group *= scales.unsqueeze(2)
            if offsets is not None:
                by_group += offsets.unsqueeze(2)
        return numbers.to(dtype)

    def outputs(self, ranges: Sequence[range]) -> Self:
        """Returns the weight of some outputs."""
        if _is_all(ranges, self.shape[0]):
            return self
        return self._by_output(lambda tensor: taken(tensor, ranges, 0))

    def rows(self, index: slice | Tensor) -> Self:
        """Returns the weight of some outputs, as views for a slice. index: a slice, or [rows] int64."""
        return self._by_output(lambda tensor: tensor[index])

    def apply(self, change: Change) -> Self:
        """Returns the weight with all its tensors changed, such as moved to a device; codes change as bytes."""
        codebook = None if self.codebook is None else change(self.codebook)
        return replace(self._by_output(change), codebook=codebook, groups=change(self.groups))

    def _by_output(self, change: Change) -> Self:
        """Returns the weight with those tensors changed that have a row for each output."""
        codes = change(self.codes.view(torch.uint8)).view(self.codes.dtype)
        scales, offsets = (_changed(scales, change) for scales in (self.stored_scales, self.stored_offsets))
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=codes, stored_scales=scales, zeros=zeros, stored_offsets=offsets)

    def inputs(self, ranges: Sequence[range]) -> Self:
        """Returns the weight of some inputs. It keeps all groups, also those without inputs."""
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
        """Returns the weight without groups that have no inputs."""
        used, groups = self.groups.unique(return_inverse=True)
        if len(used) == self.group_count:
            return self
        zeros, offsets = (None if values is None else values[:, used] for values in (self.zeros, self.offsets))
        scales = self.scales[:, used]
        return replace(self, stored_scales=scales, zeros=zeros, groups=groups, stored_offsets=offsets)

    def without_offsets(self) -> Self:
        """Returns the weight with zeros in place of offsets; it differs by the rounding of float32."""
        scales, offsets = self.scales, self.offsets
        if offsets is None:
            return self
        scales = torch.where(scales == 0, offsets.abs(), scales)
        added = offsets / torch.where(scales == 0, torch.ones_like(scales), scales)
        zeros = -added if self.zeros is None else self.zeros - added
        return replace(self, stored_scales=scales, zeros=zeros, stored_offsets=None)

    def joins(self, other: "QuantizedWeight") -> bool:
        """Returns True if both weights can be concatenated: they are of the same kind, or can be widened to 8 bits."""
        return self._is_like(other) or (self._widens(other.shape[1]) and other._widens(self.shape[1]))

    def _is_like(self, other: "QuantizedWeight") -> bool:
        """Returns True if both have the same kind of codes, and the same groups."""
        return (
            self.codes.dtype == other.codes.dtype
            and (self.codebook is None or (other.codebook is not None and torch.equal(self.codebook, other.codebook)))
            and torch.equal(self.groups, other.groups)
        )

    def _widens(self, inputs: int) -> bool:
        """Returns True if the numbers of the codes are integers of 8 bits in groups of one size."""
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
            None if values is None else values.repeat_interleave(repeats, 1) for values in (self.zeros, self.offsets)
        )
        groups = torch.arange(self.shape[1], device=self.groups.device) // group_size
        return type(self)(codes, None, scales, zeros, groups, offsets, self.six_bits)

    @classmethod
    def joined(cls, weights: Sequence["QuantizedWeight"]) -> Self:
        """Returns the weight with the outputs of all these, concatenated."""
        if not all(weights[0]._is_like(weight) for weight in weights):
            group_size = math.gcd(*(weight.group_size or 1 for weight in weights))
            weights = [weight._widened(group_size) for weight in weights]
        first = weights[0]
        zeros, offsets = None, None
        if any(weight.zeros is not None for weight in weights):
            zeros = torch.cat([weight._none if weight.zeros is None else weight.zeros for weight in weights])
        if any(weight.stored_offsets is not None for weight in weights):
            parts = [weight._none if weight.stored_offsets is None else weight.stored_offsets for weight in weights]
            offsets = _joined_scales(parts)
        codes = torch.cat([weight.codes.view(torch.uint8) for weight in weights]).view(first.codes.dtype)
        scales = _joined_scales([weight.stored_scales for weight in weights])
        six_bits = all(weight.six_bits for weight in weights)
        return cls(codes, first.codebook, scales, zeros, first.groups, offsets, six_bits)


def by_pieces(work: Callable[[T], R], pieces: Sequence[T]) -> list[R]:
    """Returns the results of `work` on pieces of a weight on the CPU, each computed by one thread, as many at a time as
    torch has threads.

    Where all threads share each operation on a piece, they meet after it, and wait for one whose core another process
    takes.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(pieces) < 2:
        return [work(piece) for piece in pieces]
    inference = torch.is_inference_mode_enabled()

    def alone(piece: T) -> R:
        with torch.inference_mode(inference):
            return work(piece)

    with ThreadPoolExecutor(threads, "weights", initializer=partial(torch.set_num_threads, 1)) as pool:
        found = list(pool.map(alone, pieces))
    torch.set_num_threads(threads)  # also for threads that start later
    return found


def _expanded(scales: Scales) -> Tensor:
    return scales.expanded() if isinstance(scales, BlockScales) else scales


def _changed(scales: Any, change: Change) -> Any:
    if isinstance(scales, BlockScales):
        return BlockScales(change(scales.blocks), change(scales.factors))
    return None if scales is None else change(scales)


def _joined_scales(parts: Sequence[Scales]) -> Scales:
    """Returns the scales of several weights, one below the other; in blocks if all of them are."""
    blocks = [part for part in parts if isinstance(part, BlockScales)]
    if len(blocks) == len(parts) and len({block.blocks.shape[1] for block in blocks}) == 1:
        return BlockScales(
            torch.cat([block.blocks for block in blocks]), torch.cat([block.factors for block in blocks])
        )
    return torch.cat([_expanded(part) for part in parts])


def paired(codes: Tensor) -> Tensor:
    """Returns codes of 4 bits, [outputs, n] uint8, as pairs in a byte, the first in the low bits: [outputs, n / 2]."""
    whole = pad(codes, (0, codes.shape[1] % 2))
    return whole[:, ::2] | whole[:, 1::2] << 4


def _is_all(ranges: Sequence[range], size: int) -> bool:
    return len(ranges) == 1 and ranges[0] == range(size)


def taken(tensor: Tensor, ranges: Sequence[range], axis: int) -> Tensor:
    """Returns parts of a tensor along an axis, with zeros beyond its end."""
    raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    size = raw.shape[axis]
    parts = [raw.narrow(axis, indices.start, max(0, min(indices.stop, size) - indices.start)) for indices in ranges]
    missing = sum(map(len, ranges)) - sum(part.shape[axis] for part in parts)
    if missing:
        shape = list(raw.shape)
        shape[axis] = missing
        parts.append(raw.new_zeros(shape))
    return torch.cat(parts, axis).view(tensor.dtype)
