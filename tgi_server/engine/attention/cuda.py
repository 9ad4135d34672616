"""Attention on CUDA: decoding by kernels of the engine's own, prompts by the flash attention that torch carries."""

import inspect
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from tgi_server.engine.attention.base import AttentionVariant, ChunkSpan, ForwardMetadata, History, KVShape
from tgi_server.engine.attention.gather import GatherAttention
from tgi_server.engine.memory import to_device

# Compute capability of the first devices that flash attention runs on.
OLDEST_DEVICE = (8, 0)
FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEAD_DIM = 256
FLASH_HEAD_DIM_STEP = 8
MAX_HEAD_DIM = 256
# Prompts with a longer history than this, in tokens, are not attended together with others: it bounds the copies.
HISTORY_TOKENS = 1 << 16

_flash: Callable[..., Any] = varlen_attn  # its arguments are not the same in all versions of torch
# True where `varlen_attn` has to be told that there are fewer KV heads than heads.
_SAYS_GROUPED = "enable_gqa" in inspect.signature(varlen_attn).parameters


class CudaAttention(GatherAttention):
    """A prompt's keys and values are copied out of their blocks, once for each chunk and layer, and attended by
    `torch.nn.attention.varlen.varlen_attn`. That takes blocks, too, in some versions of torch: but not in 2.11, where
    there are none, and not in 2.13, where the kernel writes some sequences' outputs into others' places as soon as it
    cuts long ones into parts (pytorch/pytorch#194167).

    Layers that flash attention does not know, those with soft-capping or biases or in float32, attend to prompts in
    plain torch.
    """

    block_size = 32
    any_lengths = True

    @classmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        new_enough = torch.cuda.get_device_capability() >= OLDEST_DEVICE
        return new_enough and shape.head_dim <= MAX_HEAD_DIM and find_spec("triton") is not None

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        if not metadata.chunks:
            return self._decode(layer, query, metadata, variant)
        if not self._flash_knows(variant):
            return super().attend(layer, query, metadata, variant)
        decoded = [self._decode(layer, query[: metadata.decoding], metadata, variant)] if metadata.decoding else []
        if metadata.history is None:
            groups = _together(metadata.chunks, metadata.decoding)
            metadata.history = [self._history(chunks, metadata) for chunks in groups]
        prompts = [self._prompts(layer, query, history, variant) for history in metadata.history]
        return torch.cat([*decoded, *prompts])

    def _decode(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        from tgi_server.engine.attention.paged_decode import paged_decode

        sequences = slice(metadata.decoding)
        tables, lengths = metadata.block_tables[sequences], metadata.kv_lengths[sequences]
        return paged_decode(query, self._keys[layer], self._values[layer], tables, lengths, variant)

    def _flash_knows(self, variant: AttentionVariant) -> bool:
        fits = self.dtype in FLASH_DTYPES and self.shape.head_dim <= FLASH_HEAD_DIM
        plain = not variant.softcap and variant.alibi_slopes is None
        return fits and plain and self.shape.head_dim % FLASH_HEAD_DIM_STEP == 0

    def _prompts(self, layer: int, query: Tensor, history: History, variant: AttentionVariant) -> Tensor:
        keys, values = (
            cache[layer].flatten(0, 1).index_select(0, history.slots) for cache in (self._keys, self._values)
        )
        grouped = {"enable_gqa": query.shape[1] != keys.shape[1]} if _SAYS_GROUPED else {}
        output: Tensor = _flash(
            query[history.tokens].contiguous(),
            keys,
            values,
            history.query_starts,
            history.key_starts,
            history.longest_chunk,
            history.longest,
            scale=variant.scaling,
            window_size=(variant.window - 1 if variant.window else -1, 0),
            **grouped,
        )
        return output

    def _history(self, chunks: list[tuple[int, ChunkSpan]], metadata: ForwardMetadata) -> History:
        """Returns the places of the keys of some chunks, each given with its row of the block tables."""
        slots, queries, keys = [], [0], [0]
        for row, chunk in chunks:
            places = torch.arange(chunk.kv_length, device=self.device)
            blocks = metadata.block_tables[row].index_select(0, places // self.block_size).long()
            slots.append(blocks * self.block_size + places % self.block_size)
            queries.append(queries[-1] + chunk.length)
            keys.append(keys[-1] + chunk.kv_length)
        first = chunks[0][1].start
        return History(
            tokens=slice(first, first + queries[-1]),
            slots=torch.cat(slots),
            query_starts=to_device(queries, torch.int32, self.device),
            key_starts=to_device(keys, torch.int32, self.device),
            longest_chunk=max(chunk.length for _, chunk in chunks),
            longest=max(chunk.kv_length for _, chunk in chunks),
        )


def _together(chunks: list[ChunkSpan], decoding: int) -> Iterator[list[tuple[int, ChunkSpan]]]:
    """Neighbours whose histories may be copied at once, each with its row of the block tables."""
    group: list[tuple[int, ChunkSpan]] = []
    tokens = 0
    for row, chunk in enumerate(chunks, start=decoding):
        if group and tokens + chunk.kv_length > HISTORY_TOKENS:
            yield group
            group, tokens = [], 0
        group.append((row, chunk))
        tokens += chunk.kv_length
    if group:
        yield group
