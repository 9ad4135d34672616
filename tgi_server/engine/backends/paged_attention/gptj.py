"""GPT-J: rotary positions inside the attention module, scores in float32."""

from typing import Any

from torch import Tensor
from transformers.models.gptj.modeling_gptj import GPTJAttention

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.paged_cache import PagedCache


class PagedGPTJAttention(GPTJAttention):
    paged_cache: PagedCache

    def prepare(self) -> None:
        self.variant = AttentionVariant(scaling=1.0 / float(self.scale_attn))

    def _attn(self, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """query: [1, heads, tokens, head_dim]. Returns the same shape."""
        return self.paged_cache.attend(self.layer_idx, query, self.variant).transpose(1, 2), None


SUBSTITUTES = {GPTJAttention: PagedGPTJAttention}
