"""A dense tensor that a checkpoint stores quantised, in several tensors; and functions that the formats share."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.weight import LINE, QuantizedWeight, paired
from tgi_server.engine.errors import InvalidWeights
from tgi_server.engine.memory import DeferredFree
from tgi_server.engine.parallel.plan import Slice
from tgi_server.engine.parallel.shares import Share

# What `get_slice` of open safetensors files returns, by the name of the tensor.
Files = Mapping[str, Any]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(slots=True, eq=False)
class QuantizedTensor:
    """A dense tensor that a checkpoint stores quantised, in several tensors. A shard reads its slice, `part`.

    `[...]` reads it as a dense tensor, `weights` in its quantised form; nothing is read before.

    names: of the tensors in `files`. name, whole_shape: of the dense tensor: [outputs, inputs] of a linear layer, or
    [experts, inputs, outputs] of a layer's experts.
    read: yields the whole weight, [outputs, inputs], or each expert's. Raises InvalidWeights, which names the tensor,
        for what does not fit together.
    mapped: returns the bytes of the file, where `files` does not. deferred: frees the tensors of the file.
    plain: the tensor in a checkpoint that is not quantised itself, which `[...]` then reads. transposed: the model has
    it as [inputs, outputs].
    """

    name: str
    files: Files
    names: Sequence[str]
    whole_shape: tuple[int, ...]
    read: Callable[[], Iterator[QuantizedWeight]]
    mapped: Callable[[], Iterable[Tensor]] | None = None
    part: Slice | None = None
    share: Share | None = None
    deferred: DeferredFree = field(default_factory=DeferredFree)
    plain: Any = None
    transposed: bool = False

    @property
    def stacked(self) -> bool:
        """True for the weights of a layer's experts in one tensor, False for the weight of a linear layer."""
        return len(self.whole_shape) == 3

    @property
    def shape(self) -> tuple[int, ...]:
        if self.plain is not None:
            found: tuple[int, ...] = self.plain.shape
            return found
        shape = self.whole_shape[::-1] if self.transposed else self.whole_shape
        return self.part.shape(self.share, shape) if self.part and self.share else shape

    def weights(self) -> Iterator[QuantizedWeight]:
        """Yields this shard's part of the weight, [outputs, inputs], or of each expert's. Raises InvalidWeights."""
        for weight in self.read():
            if not weight.is_finite:
                raise InvalidWeights(
                    f"the scales of tensor {self.name} are not all finite numbers; download the folder again"
                )
            yield self._part(weight)
        self.deferred.add(self.mapped() if self.mapped else (self.files[name][...] for name in self.names))

    def _part(self, weight: QuantizedWeight) -> QuantizedWeight:
        if self.part is None or self.part.axis is None or self.share is None:
            return weight
        outputs = self.part.axis == (2 if self.stacked else 1 if self.transposed else 0)
        ranges = self.part.ranges(self.share, weight.shape[0 if outputs else 1])
        return weight.outputs(ranges) if outputs else weight.inputs(ranges)

    def __getitem__(self, _: EllipsisType) -> Tensor:
        dense: Tensor
        if self.plain is not None:
            dense = self.plain[...]
        elif self.stacked:
            dense = torch.empty(self.shape, dtype=torch.bfloat16)
            for expert, weight in zip(dense, self.weights(), strict=True):
                expert.copy_(weight.dense().T)
        else:
            (weight,) = self.weights()
            dense = weight.dense().T.contiguous() if self.transposed else weight.dense()
        return dense


def parts_of(files: Files, needed: Sequence[str], optional: Sequence[str] = ()) -> list[str]:
    """Returns the names that exist. Raises InvalidWeights if a needed one is missing although the first one exists."""
    for name in needed:
        if name not in files:
            raise InvalidWeights(f"tensor {name} is missing beside {needed[0]}")
    return [*needed, *(name for name in optional if name in files)]


def read(files: Files, name: str, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()) -> Tensor:
    """Reads a tensor that has one of these shapes and dtypes, where any are given. Raises InvalidWeights."""
    found: Tensor = files[name][...]
    if shapes and tuple(found.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidWeights(f"tensor {name} has the shape {list(found.shape)}, where {expected} is expected")
    if dtypes and found.dtype not in dtypes:
        expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise InvalidWeights(
            f"tensor {name} is of {str(found.dtype).removeprefix('torch.')}, where {expected} is expected"
        )
    return found


def read_groups(files: Files, name: str, inputs: int, count: int) -> Tensor:
    """Reads the group of each input, one of `count`: [inputs] int64. Raises InvalidWeights."""
    groups = read(files, name, (inputs,)).long()
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise InvalidWeights(
            f"tensor {name} has groups from {int(groups.min())} to {int(groups.max())}; there are {count}"
        )
    return groups


def size(files: Files, name: str, dimensions: int = 2) -> tuple[int, ...]:
    """Returns the shape of a tensor without reading it. Raises InvalidWeights if it has other dimensions."""
    shape = tuple(files[name].get_shape())
    if len(shape) != dimensions:
        raise InvalidWeights(f"tensor {name} has the shape {list(shape)}, where {dimensions} dimensions are expected")
    return shape


def words_of(numbers: int, bits: int) -> int:
    """Returns the number of 32-bit words that hold this many numbers."""
    return -(-numbers * bits // 32)


def codes_of(words: Tensor, bits: int, inputs: int) -> Tensor:
    """Returns a weight's codes from words, [outputs, words] int32, low bits first, without padding between codes.

    They are [outputs, inputs] uint8, or in pairs if they have at most 4 bits, see QuantizedWeight.
    """
    if bits in (4, 8):  # the bytes of words are pairs, or codes
        bytes_ = words.flatten().view(torch.uint8).view(len(words), 4 * words.shape[1])
        return bytes_[:, : -(-inputs * bits // 8)]
    codes = unpacked(words.T, bits, inputs).T
    return paired(codes) if bits < 4 else codes.contiguous()


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Returns `count` numbers of `bits` bits each, low bits first: [count, n] uint8 from words, [words, n] int32.

    A number of 3, 5, 6 or 7 bits may begin in one word and end in the next one.
    """
    mask = 2**bits - 1
    if 32 % bits == 0:
        numbers = torch.empty(len(words), 32 // bits, words.shape[1], dtype=torch.uint8)
        for place in range(32 // bits):
            numbers[:, place] = (words >> place * bits) & mask
        return numbers.flatten(0, 1)[:count]
    first = torch.arange(count) * bits
    wide = words.long() & 0xFFFFFFFF
    pairs = wide | torch.cat([wide[1:], wide.new_zeros(1, wide.shape[1])]) << 32
    return ((pairs[first // 32] >> (first % 32).unsqueeze(1)) & mask).to(torch.uint8)


def whole_numbers(
    codes: Tensor, zeros: Tensor | None, scales: Tensor, bits: int, groups: Tensor | None = None
) -> QuantizedWeight:
    """Returns the weight (codes - zeros) * scales, of codes from 0 to 2^bits - 1.

    codes: as `codes_of` returns them. zeros, scales: [outputs, groups]; zeros None: half of the codes are below 0.
    """
    zeros = torch.full(scales.shape, float(2 ** (bits - 1))) if zeros is None else zeros.float()
    if bits <= 4:
        return QuantizedWeight.of(codes, scales, zeros, codebook=LINE, groups=groups)
    signed = (codes.to(torch.int16) - 128).to(torch.int8)
    return QuantizedWeight.of(signed, scales, zeros - 128, groups=groups)
