"""Attention on CUDA, for prompts and for sequences that decode, by the engine's own kernels in Triton."""

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tgi_server.engine import proofs
from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.checkpoint.quantized.kv_scales import KVScales
from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.kernels.triton import QueryTiles, device_fault, multiprocessors, shared_memory, variants

if TYPE_CHECKING:
    from tgi_server.engine.kernels.triton.paged_attention import LaunchShape
    from tgi_server.engine.kernels.triton.split_kv import PartsPlan

MAX_HEAD_DIM = 256
# Query heads that share their keys, whose parts one program joins.
_MOST_IN_ONE = 16


class CudaAttention(GatherAttention):
    """Attention by the Triton kernels, which read keys and values from their blocks, in all dtypes.

    A pass's tokens are cut into tiles, and their keys into parts, once for all layers with the same window.
    """

    name = "Triton"
    block_size = 32
    any_lengths = any_prompts = True
    _arrived: Tensor | None = None

    @classmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        return cls.fault(shape) is None

    @staticmethod
    def fault(shape: KVShape) -> str | None:
        """Returns the reason why the kernels cannot compute a model on this device; None if they can."""
        if shape.value_dim is not None:
            return "the attention kernels take no latents"
        if shape.head_dim > MAX_HEAD_DIM:
            return f"the attention kernels support heads of at most {MAX_HEAD_DIM} elements, not {shape.head_dim}"
        if find_spec("triton") is None:
            return "Triton is not installed"
        return device_fault(torch.device("cuda"))

    def row_places(self, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        from tgi_server.engine.kernels.triton.row_places import row_places

        return row_places(positions, tables, self.block_size)

    def write(self, layer: int, key: Tensor, value: Tensor, metadata: ForwardMetadata) -> None:
        from tgi_server.engine.kernels.triton.rope_and_cache import write

        write(key, value, self._keys[layer], self._values[layer], metadata.slots, *self._kept(layer))

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
        if interleaved:
            return super().rotate_and_write(layer, query, key, value, rotation, metadata, interleaved=True)
        from tgi_server.engine.kernels.triton.rope_and_cache import rotate_and_write

        cosine, sine = rotation
        caches = self._keys[layer], self._values[layer]
        return rotate_and_write(query, key, value, (cosine[0], sine[0]), *caches, metadata.slots, *self._kept(layer))

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
        group = query.shape[1] // key.shape[1]
        decodes = not metadata.chunks and metadata.row_tokens == 1 and metadata.ends_of(variant) is None
        if "attend_in_one" not in variants() or not decodes or interleaved or group > _MOST_IN_ONE:
            return super().write_and_attend(
                layer, query, key, value, rotation, metadata, variant, interleaved=interleaved
            )
        from tgi_server.engine.kernels.triton.decode_attention import arrivals, attend_in_one

        if self._arrived is None:
            self._arrived = arrivals(query.device, max(self.shape.heads))
        tiles, plan, _ = self._planned(layer, query, metadata, variant, 1, Lengths.ANY)
        return attend_in_one(
            query,
            key,
            value,
            None if rotation is None else (rotation[0][0], rotation[1][0]),
            self._keys[layer],
            self._values[layer],
            metadata.slots,
            metadata.block_tables,
            tiles.kv_lengths,
            plan,
            *self._kept(layer),
            self._arrived,
            scaling=variant.scaling,
            softcap=variant.softcap,
            window=variant.window,
            alibi_slopes=variant.alibi_slopes,
            rounded_alibi=variant.rounded_alibi,
            sinks=variant.sinks,
        )

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        from tgi_server.engine.kernels.triton.paged_attention import tokens_of_a_tile

        if metadata.ends_of(variant) is not None:  # not supported by the kernels
            return GatherAttention.attend(self, layer, query, metadata, variant)
        heads, (_, _, kv_heads, head_dim) = query.shape[1], self._keys[variant.source(layer)].shape
        programs = len(query) * heads / 128 / multiprocessors(query.device)
        most = tokens_of_a_tile(heads // kv_heads, head_dim, query.element_size(), programs)
        output = query.new_empty(query.shape)
        self._attend_tiles(layer, query, metadata, variant, _tile_kinds(metadata, most), output)
        return output

    def _attend_tiles(
        self,
        layer: int,
        query: Tensor,
        metadata: ForwardMetadata,
        variant: AttentionVariant,
        kinds: Iterable[tuple[int, "Lengths"]],
        output: Tensor,
    ) -> None:
        """Writes the attention of the sequences of some kinds into output, contiguous, of query's shape."""
        from tgi_server.engine.kernels.triton.paged_attention import paged_attention

        if variant.chunk:
            raise UnsupportedModel("attention in chunks is not in the Triton kernels")
        source = variant.source(layer)
        keys, values = self._keys[source], self._values[source]
        for tokens, lengths in kinds:
            tiles, plan, shape = self._planned(source, query, metadata, variant, tokens, lengths)
            paged_attention(
                query,
                keys,
                values,
                metadata.block_tables,
                tiles,
                plan,
                shape,
                *self._kept(source),
                output,
                tokens=tokens,
                scaling=variant.scaling,
                softcap=variant.softcap,
                window=variant.window,
                alibi_slopes=variant.alibi_slopes,
                rounded_alibi=variant.rounded_alibi,
                sinks=variant.sinks,
            )

    def _planned(
        self,
        layer: int,
        query: Tensor,
        metadata: ForwardMetadata,
        variant: AttentionVariant,
        tokens: int,
        lengths: "Lengths",
    ) -> "tuple[QueryTiles, PartsPlan, LaunchShape]":
        """Returns tiles of at most `tokens` tokens, the parts of their keys, and the shape of programs."""
        from tgi_server.engine.kernels.triton.paged_attention import LaunchShape
        from tgi_server.engine.kernels.triton.split_kv import plan_parts

        kv_heads, head_dim = self._keys[layer].shape[2:]
        shared = shared_memory(query.device)
        shape = LaunchShape.of(query.shape[1] // kv_heads, head_dim, query.element_size(), tokens, shared)
        tiles = metadata.made(("tiles", tokens), partial(_tiles, metadata, tokens, lengths))
        plan = metadata.made(
            ("plan", shape.rows, tokens, kv_heads, shape.key_tile, variant.window),
            partial(plan_parts, tiles, kv_heads, shape.key_tile, variant.window, shape.rows),
        )
        return tiles, plan, shape

    def _kept(self, layer: int) -> tuple[KVScales, int]:
        return self.kv_format.of(layer), self.kv_format.mantissa


def fault_of_places(attention: AttentionBackend) -> str | None:
    """Returns the reason why `row_places` must not be used; None if it computes what plain torch does."""

    def cases() -> Iterator[proofs.Case]:
        size = attention.block_size
        positions = torch.tensor([0, 1, size - 1, size, 3 * size + 5], device=attention.device)
        tables = torch.arange(5 * 7, dtype=torch.int32, device=attention.device).view(5, 7)
        found, known = (
            attention.row_places(positions, tables),
            AttentionBackend.row_places(attention, positions, tables),
        )
        for what, own, other in zip(("of slots", "of lengths"), found, known, strict=True):
            yield what, own.float(), other.float()

    return proofs.fault_of("the kernel", cases)


class Lengths(Enum):
    """Selects the sequences of a pass that a kind of tile is for, by the number of their tokens in it."""

    ANY = auto()
    ONE = auto()
    SEVERAL = auto()


def _tile_kinds(metadata: ForwardMetadata, most: int) -> list[tuple[int, Lengths]]:
    """Returns the kinds of tiles of a pass: the maximum number of tokens of a tile, and the sequences that it is for.

    In a pass with prompts, rows that decode have tiles of their own, with no room for more tokens than such a row has.
    """
    if not metadata.chunks:
        return [(min(most, metadata.row_tokens), Lengths.ANY)]
    if metadata.decoding and most > 1:
        return [(1, Lengths.ONE), (most, Lengths.SEVERAL)]
    return [(most, Lengths.ANY)]


def _tiles(metadata: ForwardMetadata, tokens: int, kind: Lengths) -> QueryTiles:
    """Returns tiles of `tokens` tokens of one sequence each; the last tile of a sequence may have fewer.

    They are computed on the device from tensors alone, so a captured step computes them again. The host does not know
    their number, so the result has the maximum number of tiles; tiles that are not needed have no tokens.
    """
    starts, kv_lengths = metadata.query_starts, metadata.kv_lengths
    lengths = starts.diff() if metadata.row_tokens > 1 or metadata.chunks else None
    if lengths is None and metadata.query_counts is not None:
        return QueryTiles(starts[:-1], metadata.query_counts, kv_lengths, starts[:-1])
    if lengths is None or kind is Lengths.ONE:
        rows = torch.arange(len(kv_lengths), dtype=torch.int32, device=starts.device)
        counts = torch.ones_like(rows) if lengths is None else torch.where(lengths == 1, 1, 0).int()
        return QueryTiles(starts[:-1], counts, kv_lengths, rows)
    numbers = (lengths + tokens - 1) // tokens
    if kind is Lengths.SEVERAL:
        numbers = torch.where(lengths > 1, numbers, 0)
    ends = numbers.cumsum(0, dtype=torch.int32)
    tile = torch.arange(len(lengths) + len(metadata.slots) // tokens, dtype=torch.int32, device=starts.device)
    sequences = torch.searchsorted(ends, tile, right=True, out_int32=True).clamp_max(len(lengths) - 1)
    offsets = (tile - (ends - numbers)[sequences]) * tokens
    counts = (lengths[sequences] - offsets).clamp(0, tokens)
    if kind is Lengths.SEVERAL:
        counts = torch.where(tile < ends[-1], counts, 0)
    before = kv_lengths[sequences] - lengths[sequences]
    return QueryTiles(starts[sequences] + offsets, counts, before + offsets + counts, sequences)
