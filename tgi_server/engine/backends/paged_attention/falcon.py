"""Falcon: one KV head for all (7B), for each group of heads (40B, 180B), or alibi (RW)."""

from typing import Any

import torch
from torch import Tensor
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.paged_cache import PagedCache
from tgi_server.engine.backends.paged_attention.alibi import geometric_slopes, slopes_of


class PagedFalconAttention(FalconAttention):
    paged_cache: PagedCache

    def prepare(self) -> None:
        slopes = None
        if self.config.alibi:
            slopes = slopes_of(self, self.num_heads, geometric_slopes)
            slopes = slopes.to(self.dense.weight.device, torch.bfloat16).float()
        self.variant = AttentionVariant(scaling=self.inv_norm_factor, alibi_slopes=slopes, rounded_alibi=True)

    def forward(
        self,
        hidden_states: Tensor,
        *_: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        """hidden_states: [1, tokens, hidden]; position_embeddings: cosines and sines. Returns hidden_states' shape."""
        query, key, value = (part.transpose(1, 2) for part in self._split(self.query_key_value(hidden_states)))
        if not self.config.alibi:
            assert position_embeddings is not None
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        self.paged_cache.update(key, value, self.layer_idx)
        attended = self.paged_cache.attend(self.layer_idx, query, self.variant)
        return self.dense(attended.flatten(2)), None

    def _split(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """fused: [1, tokens, features]. Returns query, key and value, [1, tokens, heads or kv_heads, head_dim] each.

        The grouped layout has, for each KV head, its query heads and then its key and its value.
        """
        if not self.new_decoder_architecture and self.multi_query:
            heads = fused.unflatten(2, (-1, self.head_dim))
            return heads[..., :-2, :], heads[..., -2:-1, :], heads[..., -1:, :]
        if not self.new_decoder_architecture:
            return self._split_heads(fused)
        groups = fused.unflatten(2, (-1, self.num_heads // self.num_kv_heads + 2, self.head_dim))
        return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]


SUBSTITUTES = {FalconAttention: PagedFalconAttention}
