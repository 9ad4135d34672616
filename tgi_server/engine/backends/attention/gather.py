"""Attention in plain torch: gathers a sequence's blocks and calls scaled dot-product attention.

It is right on every device and for every variant, so the other backends are compared with it.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tgi_server.engine.backends.attention.base import (
    AttentionBackend,
    AttentionVariant,
    ChunkSpan,
    ForwardMetadata,
    KVShape,
)
from tgi_server.engine.backends.attention.kv_format import decode, encode, storage
from tgi_server.engine.backends.attention.latents import attend_to_latents
from tgi_server.engine.backends.attention.pieces import pieces, scores_mask


class GatherAttention(AttentionBackend):
    block_size = 16

    @classmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        return True

    def allocate(self, num_blocks: int) -> None:
        """Caches are [blocks, block_size, kv_heads, head_dim] for each layer; layers of equal shape share a tensor."""
        self._keys, self._values, self._alike = [], [], []  # frees them, so that old and new need not fit together
        sizes = self.shape.head_dim_of, self.shape.value_dim_of
        dtypes = storage(self.kv_format.keys), storage(self.kv_format.dtype)
        layers = list(enumerate(self.shape.heads))
        kinds = [(h, size(n), dtype) for size, dtype in zip(sizes, dtypes, strict=True) for n, h in layers]
        caches: list[Tensor] = [torch.empty(0)] * len(kinds)
        for kind in dict.fromkeys(kinds):
            (heads, size, dtype), found = kind, [index for index, other in enumerate(kinds) if other == kind]
            shape = len(found), num_blocks, self.block_size, heads, size
            self._alike.append(torch.zeros(shape, dtype=dtype, device=self.device))
            for index, cache in zip(found, self._alike[-1], strict=True):
                caches[index] = cache
        self._keys, self._values = caches[: len(layers)], caches[len(layers) :]

    def write(self, layer: int, key: Tensor, value: Tensor, metadata: ForwardMetadata) -> None:
        """Stores keys and values; the slot of a position is block_table[position // block_size] * block_size + position
        % block_size.
        """
        scales, kept = self.kv_format.of(layer), self.kv_format
        self._keys[layer].flatten(0, 1)[metadata.slots] = encode(key, scales.keys, kept.keys)
        self._values[layer].flatten(0, 1)[metadata.slots] = encode(value, scales.values, kept.dtype)

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        layer = variant.source(layer)
        if variant.latents is not None:
            return attend_to_latents(self._gathered, layer, self.block_size, query, metadata, variant)
        output = torch.empty_like(query)
        _, heads, head_dim = query.shape
        for rows in pieces(metadata.decoding, metadata.max_kv_length * heads * head_dim):
            span = slice(rows.start * metadata.row_tokens, rows.stop * metadata.row_tokens)
            output[span] = self._decode(layer, query[span], rows, metadata, variant)
        ends = metadata.ends_of(variant)
        for index, chunk in enumerate(metadata.chunks, start=metadata.decoding):
            span = slice(chunk.start, chunk.start + chunk.length)
            own = None if ends is None else ends[span]
            output[span] = self._prefill(layer, query[span], metadata.block_tables[index], chunk, variant, own)
        return output

    def block_tensors(self) -> list[Tensor]:
        return [*self._keys, *self._values]

    def copy(self, source: int, target: int, tokens: int) -> None:
        for caches in self._alike:
            caches[:, target, :tokens] = caches[:, source, :tokens]

    def _decode(
        self, layer: int, query: Tensor, rows: slice, metadata: ForwardMetadata, variant: AttentionVariant
    ) -> Tensor:
        blocks = -(-metadata.max_kv_length // self.block_size)
        tables = metadata.block_tables[rows, :blocks].long()
        key, value = (kept.flatten(1, 2).transpose(1, 2) for kept in self._gathered(layer, tables))
        behind = torch.arange(metadata.row_tokens, device=query.device).flip(0)
        places = metadata.kv_lengths[rows, None].long() - 1 - behind
        mask = scores_mask(places, torch.arange(key.shape[2], device=query.device), variant, query)
        queries = query.unflatten(0, (-1, metadata.row_tokens)).transpose(1, 2)
        return _attend(queries, key, value, mask, variant).transpose(1, 2).flatten(0, 1)

    def _prefill(
        self,
        layer: int,
        query: Tensor,
        table: Tensor,
        chunk: ChunkSpan,
        variant: AttentionVariant,
        ends: Tensor | None,
    ) -> Tensor:
        blocks = table[: -(-chunk.kv_length // self.block_size)].long()
        key, value = (
            kept.flatten(0, 1)[: chunk.kv_length].transpose(0, 1).unsqueeze(0) for kept in self._gathered(layer, blocks)
        )
        positions = torch.arange(chunk.kv_length - chunk.length, chunk.kv_length, device=query.device)
        keys = torch.arange(chunk.kv_length, device=query.device)
        output = torch.empty_like(query)
        has_scores = variant.softcap or variant.alibi_slopes is not None or variant.sinks is not None
        masked_heads = query.shape[1] if has_scores else 1
        for piece in pieces(chunk.length, chunk.kv_length * masked_heads):
            seen = None if ends is None else ends[piece].unsqueeze(0)
            mask = scores_mask(positions[piece].unsqueeze(0), keys, variant, query, seen)
            part = query[piece].transpose(0, 1).unsqueeze(0)
            output[piece] = _attend(part, key, value, mask, variant).squeeze(0).transpose(0, 1)
        return output

    def _gathered(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the keys and the values in blocks: [*blocks, block_size, kv_heads, head_dim] each."""
        scales, kept = self.kv_format.of(layer), self.kv_format
        keys, values = self._keys[layer][blocks], self._values[layer][blocks]
        return (
            decode(keys, scales.keys, kept.keys, self.dtype),
            decode(values, scales.values, kept.dtype, self.dtype),
        )


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, variant: AttentionVariant) -> Tensor:
    """Returns the attention of query, [sequences, heads, queries, head_dim], in its shape.

    key, value: [sequences, kv_heads, keys, head_dim].
    """
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    if not variant.softcap and variant.sinks is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=variant.scaling)
    scores = (query @ key.transpose(2, 3)) * variant.scaling
    if variant.softcap:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    scores = scores + mask
    if variant.sinks is not None:
        sinks = variant.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[..., : key.shape[2]] @ value
