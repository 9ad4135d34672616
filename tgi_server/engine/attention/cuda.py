"""Attention on CUDA, for prompts and for sequences that decode, by the engine's own kernels in Triton."""

from importlib.util import find_spec

import torch
from torch import Tensor

from tgi_server.engine.attention.base import AttentionVariant, ChunkSpan, ForwardMetadata, KVShape, QueryTiles
from tgi_server.engine.attention.gather import GatherAttention
from tgi_server.engine.memory import copy_to_device
from tgi_server.engine.quantization.kv_scales import KVScales

# Compute capability of the first devices that the kernels were compiled for.
OLDEST_DEVICE = (8, 0)
MAX_HEAD_DIM = 256


class CudaAttention(GatherAttention):
    """Keys and values are read where they lie in their blocks, whatever is attended, in all dtypes.

    A pass's tokens are cut into tiles, and their keys into parts, once for all layers alike.
    """

    block_size = 32
    any_lengths = True

    @classmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        new_enough = torch.cuda.get_device_capability() >= OLDEST_DEVICE
        return new_enough and shape.head_dim <= MAX_HEAD_DIM and find_spec("triton") is not None

    def write(self, layer: int, key: Tensor, value: Tensor, metadata: ForwardMetadata) -> None:
        from tgi_server.engine.attention.rotary_write import write

        write(key, value, self._keys[layer], self._values[layer], metadata.slots, *self._kept(layer))

    def rotate_and_write(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotation: tuple[Tensor, Tensor],
        metadata: ForwardMetadata,
    ) -> Tensor:
        from tgi_server.engine.attention.rotary_write import rotate_and_write

        cosine, sine = rotation
        caches = self._keys[layer], self._values[layer]
        return rotate_and_write(query, key, value, (cosine[0], sine[0]), *caches, metadata.slots, *self._kept(layer))

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        from tgi_server.engine.attention.paged_attention import (
            LaunchShape,
            paged_attention,
            plan_parts,
            tokens_of_a_tile,
        )

        keys, values = self._keys[layer], self._values[layer]
        heads, kv_heads, head_dim = query.shape[1], keys.shape[2], keys.shape[3]
        group, itemsize = heads // kv_heads, query.element_size()
        most = tokens_of_a_tile(group, head_dim, itemsize)
        tokens = most if metadata.chunks else min(most, metadata.row_tokens)
        shape = LaunchShape.of(group, head_dim, itemsize, tokens)
        tiles = metadata.made(("tiles", tokens), lambda: _tiles(metadata, tokens))
        plan = metadata.made(
            ("plan", tokens, kv_heads, shape.key_tile, variant.window),
            lambda: plan_parts(tiles, kv_heads, shape.key_tile, variant.window),
        )
        return paged_attention(
            query, keys, values, metadata.block_tables, tiles, plan, shape, variant, *self._kept(layer)
        )

    def _kept(self, layer: int) -> tuple[KVScales, int]:
        return self.kv_format.of(layer), self.kv_format.mantissa


def _tiles(metadata: ForwardMetadata, tokens: int) -> QueryTiles:
    """Returns the tiles of a pass: one of each sequence that decodes, then the prompt chunks, `tokens` tokens each."""
    rows = metadata.decoding
    starts = metadata.query_starts[: rows + 1]
    if metadata.row_tokens > 1:
        return _tiles_of_rows(starts, metadata.kv_lengths[:rows], metadata.row_tokens, tokens)
    decoding = QueryTiles(starts[:-1], starts.diff(), metadata.kv_lengths[:rows], starts[:-1])
    if not metadata.chunks:
        return decoding
    prompts = torch.cat([_tiles_of(chunk, row, tokens) for row, chunk in enumerate(metadata.chunks, start=rows)], dim=1)
    first, counts, kv_lengths, sequences = copy_to_device(prompts, metadata.slots.device)
    return QueryTiles(
        torch.cat([decoding.first, first]),
        torch.cat([decoding.counts, counts]),
        torch.cat([decoding.kv_lengths, kv_lengths]),
        torch.cat([decoding.sequences, sequences]),
    )


def _tiles_of_rows(starts: Tensor, kv_lengths: Tensor, row_tokens: int, tokens: int) -> QueryTiles:
    """Returns the tiles of rows of several tokens each, made on the device: a recorded step makes them anew.

    starts: [rows + 1] int32. kv_lengths: [rows] int32; keys that a row's last token sees.
    """
    offsets = torch.arange(0, row_tokens, tokens, dtype=torch.int32, device=starts.device)
    counts = (row_tokens - offsets).clamp_max(tokens)
    first = starts[:-1, None] + offsets
    lengths = kv_lengths[:, None] - (row_tokens - offsets - counts)
    sequences = (starts[:-1, None] // row_tokens).expand_as(first)
    return QueryTiles(*(each.flatten() for each in (first, counts.expand_as(first), lengths, sequences)))


def _tiles_of(chunk: ChunkSpan, row: int, tokens: int) -> Tensor:
    """Returns the fields of a chunk's tiles on the host, [4, tiles] int32. row: of the block tables."""
    offset = torch.arange(0, chunk.length, tokens, dtype=torch.int32)
    counts = (chunk.length - offset).clamp_max(tokens)
    lengths = chunk.kv_length - chunk.length + offset + counts
    return torch.stack([chunk.start + offset, counts, lengths, torch.full_like(offset, row)])
