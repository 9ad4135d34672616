"""GPT-Neo: scores without scaling, and a window in every second layer."""

from typing import Any

from torch import Tensor
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.paged_cache import PagedCache


class PagedGPTNeoAttention(GPTNeoSelfAttention):
    paged_cache: PagedCache

    def prepare(self) -> None:
        self.layer_idx = self.layer_id
        window = int(self.config.window_size) if self.attention_type == "local" else 0
        self.variant = AttentionVariant(scaling=1.0, window=window)

    def _attn(self, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """query: [1, heads, tokens, head_dim]. Returns the same shape."""
        return self.paged_cache.attend(self.layer_idx, query, self.variant).transpose(1, 2), None


SUBSTITUTES = {GPTNeoSelfAttention: PagedGPTNeoAttention}
