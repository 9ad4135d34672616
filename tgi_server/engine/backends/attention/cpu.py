"""Attention on a CPU by the engine's own kernel: nothing is copied out of the cache, and no loop runs in Python."""

import math
from typing import Any

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.base import AttentionBackend, AttentionVariant, ForwardMetadata, KVShape
from tgi_server.engine.kernels import load_kernels
from tgi_server.engine.memory import PageReserve, mapped

MAX_HEAD_DIM = 576
LANES = 16


class CpuAttention(AttentionBackend):
    """Attention by the CPU kernels of `kernels/cpu/attention/attention.cpp`.

    keys, values: one tensor for each layer, [blocks, kv_heads, head_dim * block_size];
    `kernels/cpu/attention/kv_layout.h` describes the layout of a block. key_scales, value_scales: the layers' scales.
    """

    block_size = 32

    @classmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        sizes = shape.head_dims or (shape.head_dim,)
        fits = shape.value_dim is None and all(size % LANES == 0 and size <= MAX_HEAD_DIM for size in sizes)
        return fits and dtype in (torch.float32, torch.bfloat16, torch.float16) and load_kernels()

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes copies without KV blocks."""
        return type(self), (self.shape, self.device, self.dtype, self.kv_format)

    def allocate(self, num_blocks: int) -> None:
        """Reserves only address space: a page of memory is allocated when its first token is written."""
        shapes = [
            (num_blocks, heads, self.block_size * self.shape.head_dim_of(layer))
            for layer, heads in enumerate(self.shape.heads)
        ]
        self.keys = [mapped(shape, self.kv_format.keys, large_pages=True) for shape in shapes]
        self.values = [mapped(shape, self.kv_format.dtype, large_pages=True) for shape in shapes]
        scales = [self.kv_format.of(layer) for layer in range(self.shape.layers)]
        self.key_scales = [each.keys for each in scales]
        self.value_scales = [each.values for each in scales]
        self._pages = PageReserve([*self.keys, *self.values])

    def reserve(self, blocks: int, ahead: int, seconds: float = math.inf) -> None:
        block_bytes = max(cache[0].nbytes for cache in self.keys)
        self._pages.take(blocks * block_bytes, seconds)
        self._pages.take_ahead((blocks + ahead) * block_bytes)

    def forget_blocks(self) -> None:
        self._pages.restart()
        super().forget_blocks()

    def write(self, layer: int, key: Tensor, value: Tensor, metadata: ForwardMetadata) -> None:
        torch.ops.oatmill.write_kv(
            key, value, self.keys[layer], self.values[layer], metadata.slots, *self.kv_format.of(layer)
        )

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
        """Rotates query in place: callers must not need the unrotated query any more."""
        cosine, sine = rotation
        torch.ops.oatmill.rotate_and_write(
            query,
            key,
            value,
            cosine[0],
            sine[0],
            self.keys[layer],
            self.values[layer],
            metadata.slots,
            *self.kv_format.of(layer),
            interleaved,
        )
        return query

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        layer = variant.source(layer)
        return torch.ops.oatmill.paged_attention(
            query,
            self.keys[layer],
            self.values[layer],
            metadata.block_tables,
            metadata.kv_lengths,
            metadata.query_starts,
            variant.scaling,
            variant.window,
            variant.softcap,
            variant.alibi_slopes,
            variant.rounded_alibi,
            variant.sinks,
            *self.kv_format.of(layer),
            variant.chunk,
            metadata.ends_of(variant),
        )

    def block_tensors(self) -> list[Tensor]:
        return [*self.keys, *self.values]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the whole block; entries after the first `tokens` are overwritten before they are read."""
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[target] = keys[source]
            values[target] = values[source]
