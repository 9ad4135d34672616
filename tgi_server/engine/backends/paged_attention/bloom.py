"""BLOOM: alibi, and queries, keys and values of one head side by side in one projection."""

from typing import Any

from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.paged_cache import PagedCache
from tgi_server.engine.backends.paged_attention.alibi import geometric_slopes, slopes_of


class PagedBloomAttention(BloomAttention):
    paged_cache: PagedCache

    def prepare(self) -> None:
        slopes = slopes_of(self, self.num_heads, geometric_slopes).to(self.dense.weight.device)
        self.variant = AttentionVariant(scaling=self.inv_norm_factor, alibi_slopes=slopes)

    def forward(self, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """hidden_states and residual: [1, tokens, hidden]. Returns [1, tokens, hidden]."""
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        self.paged_cache.update(key, value, self.layer_idx)
        attended = self.paged_cache.attend(self.layer_idx, query, self.variant)
        return residual + self.dense(attended.flatten(2)), None


SUBSTITUTES = {BloomAttention: PagedBloomAttention}
