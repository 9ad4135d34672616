"""The interface of attention backends, and the metadata that a forward pass hands them."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.kv_format import KVFormat
from tgi_server.engine.memory import give_back

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of a token's entry in the cache.

    heads: number of KV heads in each layer (multi-query models have one); 0: the layer has no keys of its own.
    head_dim: elements of a head, the maximum of all layers. head_dims: those of each layer's heads, if layers differ.
    value_dim: elements of a cached value, if it has not as many as a key; see `Latents`.
    """

    heads: tuple[int, ...]
    head_dim: int
    head_dims: tuple[int, ...] | None = None
    value_dim: int | None = None

    @property
    def layers(self) -> int:
        return len(self.heads)

    def joined(self) -> "KVShape":
        """Returns the shape in which key and value both consist of a latent and the value cached with it."""
        return replace(self, head_dim=self.head_dim + (self.value_dim or 0), value_dim=None)

    def head_dim_of(self, layer: int) -> int:
        return self.head_dim if self.head_dims is None else self.head_dims[layer]

    def value_dim_of(self, layer: int) -> int:
        return self.head_dim_of(layer) if self.value_dim is None else self.value_dim

    def bytes_per_token(self, keys: torch.dtype, values: torch.dtype) -> int:
        sizes = (
            self.head_dim_of(layer) * keys.itemsize + self.value_dim_of(layer) * values.itemsize
            for layer in range(self.layers)
        )
        return sum(heads * size for heads, size in zip(self.heads, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """The position of one sequence's prompt chunk in a forward pass.

    start: index of its first token among the pass's tokens. length: number of its tokens.
    kv_length: tokens of the sequence whose keys are in the cache once this chunk is written.
    drafted: the tokens may turn out to be wrong. saves: pairs of a number of the chunk's tokens and the snapshot for
    the states after them; ascending.
    """

    start: int
    length: int
    kv_length: int
    drafted: bool = False
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class ForwardMetadata:
    """Data that attention needs about the tokens of a pass: their slots in the cache, block tables and lengths.

    Sequences that decode come first, `row_tokens` neighbouring tokens each, mostly one; then come the prompt chunks,
    one after the other.

    slots: [tokens] int64; block * block_size + offset of each token's place in the cache.
    block_tables: [sequences, blocks] int32; entries past a sequence's last block are 0.
    kv_lengths: [sequences] int32; tokens in the cache, this pass's own included.
    query_starts: [sequences + 1] int32; index of each sequence's first token in this pass.
    query_counts: [sequences] int32; the tokens of each sequence in this pass; None: they have to be computed.
    decoding: number of sequences that decode.
    chunks: the prompt chunks, on the host.
    max_kv_length: an upper bound of kv_lengths, known without asking the device.
    top: None: every logit is needed.
    ends: [tokens] int32; number of tokens of its sequence that each token attends to, ascending in a chunk; None:
    causal attention. ends_in_windows: True if `ends` applies only to layers with a window.
    state_slots: the slot of each sequence's states, on the host; empty if the model has none.
    row_slots: [decoding] int64; the slots of the sequences that decode, on the device.
    kept: objects that a backend made for this pass in an earlier layer; see `made`.
    """

    slots: Tensor
    block_tables: Tensor
    kv_lengths: Tensor
    query_starts: Tensor
    decoding: int
    chunks: list[ChunkSpan]
    max_kv_length: int
    row_tokens: int = 1
    ends: Tensor | None = None
    ends_in_windows: bool = False
    state_slots: list[int] = field(default_factory=list)
    row_slots: Tensor | None = None
    query_counts: Tensor | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict)

    def ends_of(self, variant: "AttentionVariant") -> Tensor | None:
        """Returns `ends` for a layer."""
        return None if self.ends_in_windows and not variant.window else self.ends

    def made(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of `make` for this key, which is called once for each pass."""
        if key not in self.kept:
            self.kept[key] = make()
        made: T = self.kept[key]
        return made


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """Multi-head latent attention (DeepSeek-V2, 2024): the cache of a token is shared by all heads of a layer.

    The latent, [rank], is cached as the key, and the part of the keys with rotary positions as the value. keys:
    [heads, size, rank]; the other part of a head's key is keys @ latent. values: [heads, rank, value_dim]; a head's
    value is latent @ values.
    """

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The index of sparse attention (DeepSeek-V3.2, 2025): queries attend only to the tokens with the highest scores.

    layer: the layer that caches the index's keys, after its values; it may be an earlier layer. query: [tokens, heads,
    size] of this pass. weights: [tokens, heads] float32, weights of the heads in the sum of their scores.
    """

    layer: int
    query: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """The differences of one layer's attention from plain causal attention.

    scaling: factor of the scores before softmax. window: number of tokens attended to, including the token itself; 0:
    all. chunk: length of chunks; a token attends to tokens of its own chunk (Llama 4); 0: no chunks.
    softcap: scores become softcap * tanh(score / softcap); 0: off.
    alibi_slopes: [heads] float32; slope * position of the key is added to each score (Press et al. 2022).
    rounded_alibi: position and slope * position are rounded to bfloat16, then scaled like a score (Falcon).
    sinks: [heads] float32; a score for each head that belongs to no token but counts in the softmax (gpt-oss).
    keys_of: the earlier layer whose keys and values are attended to (Gemma 3n); None: the layer's own.
    latents: projections from the cached latents to keys and values; None: keys and values are cached.
    chosen: number of tokens that the index chooses for a query, with latents; 0: all. selection: the index in this
    pass.
    """

    scaling: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    rounded_alibi: bool = False
    sinks: Tensor | None = None
    keys_of: int | None = None
    latents: Latents | None = None
    chosen: int = 0
    selection: Selection | None = None

    def source(self, layer: int) -> int:
        """Returns the layer whose keys and values `layer` attends to."""
        return layer if self.keys_of is None else self.keys_of


class AttentionBackend(ABC):
    """Owns the KV blocks of all layers, writes new keys and values into them, and attends over them.

    Block 0 is scratch: tokens of sequences that have ended are written there.

    dtype: dtype of the model, of new keys and values, and of the computation. kv_format: format of the cache.
    any_lengths: True if a step without prompts launches the same work for all sequence lengths and slots, because these
    are only in the tensors of its metadata. any_prompts: the same for steps with prompts. name: name of the attention
    kernels on a GPU for the log; empty: there is no choice.
    """

    name = ""

    block_size: int
    any_lengths = False
    any_prompts = False

    def __init__(
        self, shape: KVShape, device: torch.device, dtype: torch.dtype, kv_format: KVFormat | None = None
    ) -> None:
        """kv_format: None: keys and values are stored in the model's dtype."""
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.kv_format = kv_format or KVFormat(dtype)

    @property
    def token_bytes(self) -> int:
        """The bytes that a token's keys and values take."""
        return self.shape.bytes_per_token(self.kv_format.keys, self.kv_format.dtype)

    @classmethod
    @abstractmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        """Returns True if this backend computes the right result for the model, fast or not."""

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Allocates blocks 0 .. num_blocks - 1 and drops the earlier contents."""

    def reserve(self, blocks: int, ahead: int, seconds: float = math.inf) -> None:  # noqa: B027
        """Allocates memory for the first `blocks` blocks, which are needed now, during at most about `seconds`.

        Memory for `ahead` more blocks is allocated in the background. Backends that allocate all memory in `allocate`
        do nothing here.
        """

    def forget_blocks(self) -> None:
        """Returns the memory of all blocks to the system, on a CPU. Their contents are undefined afterwards."""
        for tensor in self.block_tensors():
            storage = tensor.untyped_storage()
            give_back(storage.data_ptr(), storage.nbytes())

    def row_places(self, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the slot of each row's next token, [rows] int64, and the row's length with it, [rows] int32.

        positions: [rows] int64; positions of the next tokens. tables: [rows, blocks] int32.
        """
        size = self.block_size
        blocks = tables.gather(1, positions[:, None] // size)[:, 0]
        return blocks * size + positions % size, (positions + 1).to(torch.int32)

    @abstractmethod
    def write(self, layer: int, key: Tensor, value: Tensor, metadata: ForwardMetadata) -> None:
        """Puts key and value, [tokens, kv_heads, head_dim], into their slots."""

    def rotate_and_write(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor],
        metadata: ForwardMetadata,
        *,
        interleaved: bool = False,
    ) -> Tensor:
        """Rotates query and key by their positions, then writes key and value. Returns the rotated query.

        query: [tokens, heads, head_dim]; key and value: [tokens, kv_heads, head_dim]. rotation: cosine and sine,
        each [1, tokens, rotated], of rotary position embeddings whose pairs are half of `rotated` apart.
        interleaved: pairs are neighbours; the first half of `rotated` has their cosines and sines.
        """
        cosine, sine = (table[0].unsqueeze(1) for table in rotation)
        turn = rotate_pairs if interleaved else rotate
        self.write(layer, turn(key, cosine, sine), value, metadata)
        return turn(query, cosine, sine)

    @abstractmethod
    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        """Returns the causal attention of query, [tokens, heads, head_dim], over each sequence's blocks.

        The result has query's shape, or with latents [tokens, heads, value_dim]. Call it after `write` for the same
        layer and pass.
        """

    def write_and_attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        metadata: ForwardMetadata,
        variant: AttentionVariant,
        *,
        interleaved: bool = False,
    ) -> Tensor:
        """Does what `rotate_and_write` and then `attend` do. rotation: None: query and key are not rotated."""
        if rotation is None:
            self.write(layer, key, value, metadata)
        else:
            query = self.rotate_and_write(layer, query, key, value, rotation, metadata, interleaved=interleaved)
        return self.attend(layer, query, metadata, variant)

    @abstractmethod
    def block_tensors(self) -> list[Tensor]:
        """Returns the tensors of the blocks: [blocks, ...] each, contiguous, valid until the next `allocate`."""

    @abstractmethod
    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` entries of a block to another, in all layers."""


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates the first elements of heads, as many as the tables have; pairs are half of that number apart."""
    turned, kept = x.split((cosine.shape[-1], x.shape[-1] - cosine.shape[-1]), dim=-1)
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cosine + torch.cat([-high, low], dim=-1) * sine, kept], dim=-1)


def rotate_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates the first elements of heads in pairs of neighbours; the first half of the tables has their angles."""
    turned, kept = x.split((cosine.shape[-1], x.shape[-1] - cosine.shape[-1]), dim=-1)
    even, odd = turned.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosine[..., : even.shape[-1]], sine[..., : even.shape[-1]]
    pairs = torch.stack([even * cosine - odd * sine, odd * cosine + even * sine], -1)
    return torch.cat([pairs.flatten(-2), kept], dim=-1)
