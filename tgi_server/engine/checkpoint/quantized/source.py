"""The tensors of a checkpoint that make up a quantised weight."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.checkpoint.quantized.weight import LINE, QuantizedWeight, paired
from tgi_server.engine.errors import InvalidWeights

# What `get_slice` of open safetensors files returns, by the name of the tensor.
Files = Mapping[str, Any]


class TensorSource(ABC):
    """The tensors of one quantised weight, which are read when they are asked for.

    name: of the dense tensor that they stand for. parts: the names of the tensors.
    """

    def __init__(self, name: str, parts: tuple[str, ...], files: Files) -> None:
        self.name = name
        self.parts = parts
        self._files = files

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense tensor."""

    @abstractmethod
    def weights(self) -> Iterator[QuantizedWeight]:
        """Yields the weight, [outputs, inputs], or each of those that are stacked in the tensor.

        Raises InvalidWeights, which names the tensor, for what does not fit together.
        """

    @abstractmethod
    def dense(self) -> Tensor:
        """Returns the dense tensor. Raises InvalidWeights as `weights` does."""

    def tensor(self, name: str, *shapes: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()) -> Tensor:
        """Reads a tensor that has one of these shapes and dtypes, where any are given. Raises InvalidWeights."""
        found: Tensor = self._files[name][...]
        if shapes and tuple(found.shape) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise InvalidWeights(f"tensor {name} has the shape {list(found.shape)}, where {wanted} is expected")
        if dtypes and found.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise InvalidWeights(
                f"tensor {name} is of {str(found.dtype).removeprefix('torch.')}, where {wanted} is expected"
            )
        return found

    def stored(self) -> Iterator[Tensor]:
        """Yields the tensors as they are in the files."""
        return (self._files[name][...] for name in self.parts)

    def size(self, name: str, dimensions: int = 2) -> tuple[int, ...]:
        """Returns the shape of a tensor without reading it. Raises InvalidWeights if it has other dimensions."""
        shape = tuple(self._files[name].get_shape())
        if len(shape) != dimensions:
            raise InvalidWeights(
                f"tensor {name} has the shape {list(shape)}, where {dimensions} dimensions are expected"
            )
        return shape


class QuantizedSource(TensorSource):
    """The tensors of the weight of a linear layer, [outputs, inputs]."""

    @abstractmethod
    def read(self) -> QuantizedWeight:
        """Returns the whole weight. Raises InvalidWeights, which names the tensor, for what does not fit together."""

    def weights(self) -> Iterator[QuantizedWeight]:
        yield self.read()

    def dense(self) -> Tensor:
        return self.read().dense()


class StackedSource(TensorSource):
    """The tensors of the weights of a layer's experts, whose dense tensor is [experts, inputs, outputs]."""

    def dense(self) -> Tensor:
        dense = torch.empty(self.shape, dtype=torch.bfloat16)
        for expert, weight in zip(dense, self.weights(), strict=True):
            expert.copy_(weight.dense().T)
        return dense


def words_of(numbers: int, bits: int) -> int:
    """Returns the words of 32 bits that so many numbers take."""
    return -(-numbers * bits // 32)


def codes_of(words: Tensor, bits: int, inputs: int) -> Tensor:
    """Returns a weight's codes from words, [outputs, words] int32, low bits first, each filled up with nothing.

    They are [outputs, inputs] uint8, or in pairs if they have at most 4 bits, see QuantizedWeight.
    """
    if bits in (4, 8):  # the bytes of words are pairs, or codes
        bytes_ = words.flatten().view(torch.uint8).view(len(words), 4 * words.shape[1])
        return bytes_[:, : -(-inputs * bits // 8)]
    codes = unpacked(words.T, bits, inputs).T
    return paired(codes) if bits < 4 else codes.contiguous()


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Returns `count` numbers of so many bits each, low bits first: [count, n] uint8 from words, [words, n] int32.

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
