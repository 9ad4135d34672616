"""Sequences of different lengths as the rows of one batch, filled up to the longest.

Growing texts are padded on the left, so that every row's next token comes at the same index; prompts of an encoder are
padded on the right, so that they keep their positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tgi_server.engine.errors import UnsupportedModel

# The axis of keys and values, [rows, heads, tokens, head_dim], along which sequences differ.
LENGTH_OF_KEYS = 2
# Layers of a cache that hold only keys and values, states of fixed size, or both.
_JOINABLE = ("DynamicLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "DummyLayer")


@dataclass(frozen=True, slots=True)
class _Place:
    """owner[key] is a tensor with one row for each sequence, padded along `axis`; None: all rows are of one size."""

    owner: dict[Any, Tensor]
    key: Any
    axis: int | None
    left: bool = True


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoder's states of some prompts, [rows, longest, hidden_size], and their mask, [rows, longest] int64."""

    states: Tensor
    mask: Tensor
    lengths: list[int]


class PaddedBatch:
    """The KV cache and the lengths of the sequences in a padded batch.

    cache: the cache that the model's own code reads and extends. lengths: tokens of each row in it.
    mask: [rows, longest] int64; 0 where a row is padded. adapters: the number of each row's adapter, 0 for none.
    encoder_lengths, encoder_mask, encoder_states: those of the encoder's prompts; empty without an encoder.
    """

    def __init__(
        self,
        cache: Cache,
        lengths: list[int],
        mask: Tensor,
        encoded: Encoded | None = None,
        adapters: list[int] | None = None,
    ) -> None:
        self.cache = cache
        self.lengths = lengths
        self.adapters = adapters or [0] * len(lengths)
        self.encoder_lengths = encoded.lengths if encoded else []
        self._tensors = {"mask": mask, "positions": torch.tensor(lengths, device=mask.device)}
        self._encoder_tensors = {"mask": encoded.mask, "states": encoded.states} if encoded else {}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def mask(self) -> Tensor:
        return self._tensors["mask"]

    @property
    def positions(self) -> Tensor:
        """The position of each row's next token, [rows] int64."""
        return self._tensors["positions"]

    @property
    def encoder_mask(self) -> Tensor:
        return self._encoder_tensors["mask"]

    @property
    def encoder_states(self) -> Tensor:
        """[rows, longest, hidden_size]"""
        return self._encoder_tensors["states"]

    def grow(self) -> None:
        """Adds one token to every row. Call it when the model is about to compute that token."""
        ones = self.mask.new_ones(len(self), 1)
        self._tensors["mask"] = torch.cat([self.mask, ones], dim=1)
        self._tensors["positions"] = self.positions + 1
        self.lengths = [length + 1 for length in self.lengths]

    def append(self, other: "PaddedBatch") -> None:
        """Appends the other batch's rows to this one's."""
        for mine, theirs in zip(self._places(), other._places(), strict=True):
            own, new = mine.owner[mine.key], theirs.owner[theirs.key]
            if mine.axis is not None:
                longest = max(own.shape[mine.axis], new.shape[mine.axis])
                own, new = (_widen(tensor, mine.axis, longest, mine.left) for tensor in (own, new))
            mine.owner[mine.key] = torch.cat([own, new])
        self.lengths = self.lengths + other.lengths
        self.adapters = self.adapters + other.adapters
        self.encoder_lengths = self.encoder_lengths + other.encoder_lengths

    def select(self, rows: list[int]) -> None:
        """Moves row rows[i] to row i, for all i, and removes padding that no row needs any more."""
        index = torch.tensor(rows, device=self.mask.device)
        self.lengths = [self.lengths[row] for row in rows]
        self.adapters = [self.adapters[row] for row in rows]
        self.encoder_lengths = [self.encoder_lengths[row] for row in rows] if self.encoder_lengths else []
        for place in self._places():
            tensor = place.owner[place.key]
            if place.axis is not None:
                longest = max(self.lengths if place.left else self.encoder_lengths)
                first = tensor.shape[place.axis] - longest if place.left else 0
                tensor = tensor.narrow(place.axis, first, longest)
            place.owner[place.key] = tensor.index_select(0, index)

    @property
    def has_keys(self) -> bool:
        """Returns True if the model has keys of each token; some models only have a state of fixed size."""
        layers = getattr(self.cache, "layers", None)  # a cache of encoder and decoder has none, and always keys
        return layers is None or any(getattr(layer, "keys", None) is not None for layer in layers)

    def row_bytes(self) -> tuple[int, int]:
        """Returns the bytes that a row takes for each token, and the bytes that do not depend on its length.

        With an encoder the first are those of a prompt token or of a generated one, whichever takes more.
        """
        growing, encoded, fixed = 0, 0, 0
        for place in self._places():
            tensor = place.owner[place.key]
            if place.axis is None:
                fixed += tensor.nbytes // len(tensor)
            elif place.left:
                growing += tensor.nbytes // (len(tensor) * tensor.shape[place.axis])
            else:
                encoded += tensor.nbytes // (len(tensor) * tensor.shape[place.axis])
        return max(growing, encoded), fixed

    def _places(self) -> Iterator[_Place]:
        yield _Place(self._tensors, "positions", None)
        yield _Place(self._tensors, "mask", 1)
        for key in self._encoder_tensors:
            yield _Place(self._encoder_tensors, key, 1, left=False)
        if isinstance(self.cache, EncoderDecoderCache):
            yield from _cached(self.cache.self_attention_cache, left=True)
            yield from _cached(self.cache.cross_attention_cache, left=False)
        else:
            yield from _cached(self.cache, left=True)


def joinable_cache(config: PretrainedConfig) -> DynamicCache:
    """Returns a cache whose rows can be padded, joined and taken out.

    Layers with a window keep all tokens, since rows of different lengths have their windows at different places.
    Raises UnsupportedModel for a model with another kind of memory.
    """
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
        elif type(layer).__name__ not in _JOINABLE:
            raise UnsupportedModel(f"it remembers text in a {type(layer).__name__}")
    return cache


def _cached(cache: Cache, left: bool) -> Iterator[_Place]:
    for layer in cache.layers:
        if getattr(layer, "keys", None) is not None:
            yield _Place(vars(layer), "keys", LENGTH_OF_KEYS, left)
            yield _Place(vars(layer), "values", LENGTH_OF_KEYS, left)
        for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
            yield from (_Place(states, key, None) for key, state in states.items() if state is not None)


def _widen(tensor: Tensor, axis: int, length: int, left: bool) -> Tensor:
    missing = length - tensor.shape[axis]
    if not missing:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = missing
    padding = tensor.new_zeros(shape)
    return torch.cat([padding, tensor] if left else [tensor, padding], dim=axis)
