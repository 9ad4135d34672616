"""Attention over latents on CUDA: sequences that decode by a Triton kernel, prompts in plain torch."""

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.base import AttentionVariant, ForwardMetadata, KVShape
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.attention.latents import attend_to_latents
from tgi_server.engine.kernels.triton import QueryTiles, device_fault

_MOST_RANK = 512


class LatentAttention(GatherAttention):
    """Latents of all layers; indices of sparse attention, caches in FP8 and prompts are left to plain torch."""

    name = "Triton"
    block_size = 32
    any_lengths = True

    @classmethod
    def supports(cls, shape: KVShape, dtype: torch.dtype) -> bool:
        return cls.fault(shape) is None

    @staticmethod
    def fault(shape: KVShape) -> str | None:
        """Returns why the kernel cannot compute a model on this device, in words; None if it can."""
        if shape.value_dim is None:
            return "the model has no latents"
        if shape.head_dim > _MOST_RANK:
            return f"the kernel takes latents of at most {_MOST_RANK} elements, not {shape.head_dim}"
        if find_spec("triton") is None:
            return "Triton is not installed"
        return device_fault(torch.device("cuda"))

    def fault_of(self, variants: Iterable[AttentionVariant]) -> str | None:
        """Returns why the kernel cannot compute layers that attend in these ways, in words; None if it can."""
        if self.kv_format.fp8:
            return "the kernel does not take latents in FP8"
        if any(variant.chosen for variant in variants):
            return "the kernel has no index of sparse attention"
        return None

    def attend(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        assert variant.latents is not None
        layer = variant.source(layer)
        rows = metadata.decoding * metadata.row_tokens
        decoded = self._attend_rows(layer, query[:rows], metadata, variant) if rows else None
        if not metadata.chunks and decoded is not None:
            return decoded
        return attend_to_latents(self._gathered, layer, self.block_size, query, metadata, variant, decoded)

    def _attend_rows(self, layer: int, query: Tensor, metadata: ForwardMetadata, variant: AttentionVariant) -> Tensor:
        """Returns what the rows that decode attend to, [tokens, heads, value_dim]."""
        from tgi_server.engine.kernels.triton.latents import LatentShape, attend_latents
        from tgi_server.engine.kernels.triton.split_kv import plan_parts

        latents = variant.latents
        assert latents is not None
        size = latents.keys.shape[1]
        heads = query.shape[1]
        tiles = metadata.made("latent tiles", partial(tiles_of_rows, metadata))
        shape = LatentShape.of(heads, query.element_size(), query.device)
        groups, key_tile = heads // shape.group, shape.key_tile
        plan = metadata.made(("latent plan", groups, key_tile), partial(plan_parts, tiles, groups, key_tile, 0))
        in_latents = torch.einsum("thd,hdr->thr", query[..., :size], latents.keys)
        caches = self._keys[layer], self._values[layer]
        attended = attend_latents(
            in_latents, query[..., size:], *caches, metadata.block_tables, tiles, plan, shape, variant.scaling
        )
        return torch.einsum("thr,hrv->thv", attended, latents.values)


def tiles_of_rows(metadata: ForwardMetadata) -> QueryTiles:
    """Returns a tile for each token of the sequences that decode, computed on the device from tensors alone."""
    rows, tokens = metadata.decoding, metadata.row_tokens
    device = metadata.kv_lengths.device
    first = torch.arange(rows * tokens, dtype=torch.int32, device=device)
    behind = torch.arange(tokens, dtype=torch.int32, device=device).flip(0)
    kv_lengths = (metadata.kv_lengths[:rows, None] - behind).flatten()
    return QueryTiles(first, torch.ones_like(first), kv_lengths, first // tokens)
