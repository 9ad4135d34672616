"""Attention on CUDA, for prompts and for sequences that decode, by the engine's own kernels in Triton."""

from importlib.util import find_spec

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.base import AttentionVariant, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.checkpoint.quantized.kv_scales import KVScales
from tgi_server.engine.kernels.triton import OLDEST_DEVICE, QueryTiles

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

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        from tgi_server.engine.kernels.triton.paged_attention import (
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
            query,
            keys,
            values,
            metadata.block_tables,
            tiles,
            plan,
            shape,
            *self._kept(layer),
            scaling=variant.scaling,
            softcap=variant.softcap,
            window=variant.window,
            alibi_slopes=variant.alibi_slopes,
            rounded_alibi=variant.rounded_alibi,
            sinks=variant.sinks,
        )

    def _kept(self, layer: int) -> tuple[KVScales, int]:
        return self.kv_format.of(layer), self.kv_format.mantissa


def _tiles(metadata: ForwardMetadata, tokens: int) -> QueryTiles:
    """Returns the tiles of a pass, `tokens` tokens of a sequence each, the last of each sequence's may have fewer.

    They are made on the device, from its tensors alone: a recorded step makes them anew. As their number is not known
    on the host, there are as many as there may be at most; those that are left over have no tokens.
    """
    starts, kv_lengths = metadata.query_starts, metadata.kv_lengths
    lengths = starts.diff()
    if metadata.row_tokens == 1 and not metadata.chunks:
        return QueryTiles(starts[:-1], lengths, kv_lengths, starts[:-1])
    numbers = (lengths + tokens - 1) // tokens
    ends = numbers.cumsum(0, dtype=torch.int32)
    tile = torch.arange(len(lengths) + len(metadata.slots) // tokens, dtype=torch.int32, device=starts.device)
    sequences = torch.searchsorted(ends, tile, right=True, out_int32=True).clamp_max(len(lengths) - 1)
    offsets = (tile - (ends - numbers)[sequences]) * tokens
    counts = (lengths[sequences] - offsets).clamp(0, tokens)
    before = kv_lengths[sequences] - lengths[sequences]
    return QueryTiles(starts[sequences] + offsets, counts, before + offsets + counts, sequences)
