"""Attention over latents on CUDA: sequences that decode, and the writing, by Triton kernels; prompts in plain torch."""

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.base import AttentionVariant, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.latents import attend_to_latents
from tgi_server.engine.kernels.triton import QueryTiles, device_fault

if TYPE_CHECKING:
    from tgi_server.engine.kernels.triton.latents import LatentNorm

_MOST_RANK = 512
Rotation = tuple[Tensor, Tensor]


class LatentAttention(GatherAttention):
    """Attends to latents by Triton kernels; sparse attention, caches in FP8 and prompts are left to plain torch."""

    name = "Triton"
    block_size = 32
    any_lengths = True

    @classmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        return cls.fault(shape) is None

    @staticmethod
    def fault(shape: KVShape) -> str | None:
        """Returns the reason why the kernel cannot compute a model on this device; None if it can."""
        if shape.value_dim is None:
            return "the model has no latents"
        if shape.head_dim > _MOST_RANK:
            return f"the kernel takes latents of at most {_MOST_RANK} elements, not {shape.head_dim}"
        if find_spec("triton") is None:
            return "Triton is not installed"
        return device_fault(torch.device("cuda"))

    def fault_of(self, variants: Iterable[AttentionVariant]) -> str | None:
        """Returns the reason why the kernel cannot compute layers with these variants; None if it can."""
        if self.kv_format.fp8:
            return "the kernel does not take latents in FP8"
        if any(variant.chosen for variant in variants):
            return "the kernel has no index of sparse attention"
        return None

    def row_places(self, positions: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        from tgi_server.engine.kernels.triton.row_places import row_places

        return row_places(positions, tables, self.block_size)

    def write_joined(
        self,
        layer: int,
        joined: Tensor,
        of_queries: "LatentNorm | None",
        of_keys: "LatentNorm",
        rotation: Rotation | None,
        metadata: ForwardMetadata,
        *,
        interleaved: bool,
    ) -> Tensor:
        """Normalises latents, rotates the other parts, and writes both to their slots. Returns the normalised queries.

        joined: queries, latents and the parts to rotate, [tokens, outputs]. rotation: cosine and sine, [tokens,
        rotated] each; None: nothing is rotated. Others: see `kernels.triton.latents.write_latents`.
        """
        from tgi_server.engine.kernels.triton.latents import write_latents

        caches, slots = (self._keys[layer], self._values[layer]), metadata.slots
        rotated = self._values[layer].shape[3]
        return write_latents(joined, of_queries, of_keys, rotation, *caches, slots, rotated, interleaved=interleaved)

    def attend_turning(
        self,
        layer: int,
        query: Tensor,
        rotation: Rotation | None,
        metadata: ForwardMetadata,
        variant: AttentionVariant,
        *,
        interleaved: bool,
    ) -> Tensor:
        """Does what `attend` does, for sequences that decode; rotates the last elements of their queries first."""
        return self._attend_rows(variant.source(layer), query, metadata, variant, rotation, interleaved=interleaved)

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        layer = variant.source(layer)
        rows = metadata.decoding * metadata.row_tokens
        decoded = self._attend_rows(layer, query[:rows], metadata, variant) if rows else None
        if not metadata.chunks and decoded is not None:
            return decoded
        return attend_to_latents(self._gathered, layer, self.block_size, query, metadata, variant, decoded)

    def _attend_rows(
        self,
        layer: int,
        query: Tensor,
        metadata: ForwardMetadata,
        variant: AttentionVariant,
        rotation: Rotation | None = None,
        *,
        interleaved: bool = False,
    ) -> Tensor:
        """Returns the attention of the rows that decode, [tokens, heads, value_dim], contiguous."""
        from tgi_server.engine.kernels.triton.latents import LatentShape, attend_latents
        from tgi_server.engine.kernels.triton.split_kv import plan_parts

        latents = variant.latents
        assert latents is not None
        size = latents.keys.shape[1]
        tokens, heads, _ = query.shape
        tiles = metadata.made("latent tiles", partial(tiles_of_rows, metadata))
        shape = LatentShape.of(heads, query.element_size(), query.device)
        groups, key_tile = heads // shape.group, shape.key_tile
        plan = metadata.made(("latent plan", groups, key_tile), partial(plan_parts, tiles, groups, key_tile, 0))
        in_latents = torch.bmm(query[..., :size].transpose(0, 1), latents.keys).transpose(0, 1)
        attended = attend_latents(
            in_latents,
            query[..., size:],
            self._keys[layer],
            self._values[layer],
            metadata.block_tables,
            tiles,
            plan,
            shape,
            variant.scaling,
            rotation,
            interleaved=interleaved,
        )
        output = query.new_empty(tokens, heads, latents.values.shape[2])
        torch.bmm(attended.transpose(0, 1), latents.values, out=output.transpose(0, 1))
        return output


def tiles_of_rows(metadata: ForwardMetadata) -> QueryTiles:
    """Returns a tile for each token of the sequences that decode, computed on the device from tensors alone."""
    rows, tokens, starts = metadata.decoding, metadata.row_tokens, metadata.query_starts
    if metadata.query_counts is not None:
        return QueryTiles(starts[:-1], metadata.query_counts, metadata.kv_lengths, starts[:-1])
    device = metadata.kv_lengths.device
    first = torch.arange(rows * tokens, dtype=torch.int32, device=device)
    behind = torch.arange(tokens, dtype=torch.int32, device=device).flip(0)
    kv_lengths = (metadata.kv_lengths[:rows, None] - behind).flatten()
    return QueryTiles(first, torch.ones_like(first), kv_lengths, first // tokens)
