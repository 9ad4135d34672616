"""Llama 4: layers with rotary positions attend in chunks; those without scale their queries by their positions."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.paged_cache import PagedCache

IMPLEMENTATION = "oatmill_paged_llama4"


class PagedLlama4Attention(Llama4TextAttention):
    paged_cache: PagedCache

    def prepare(self) -> None:
        chunked = self.config.layer_types[self.layer_idx] == "chunked_attention"
        chunk = int(self.config.attention_chunk_size) if chunked else 0
        self.variant = AttentionVariant(scaling=self.scaling, chunk=chunk)
        own: Any = self
        self.tuned = bool(own.attn_temperature_tuning and not own.use_rope)
        own.attn_temperature_tuning = False  # it would count positions from the beginning of the pass

    def tune(self, query: Tensor) -> Tensor:
        """Returns query, [1, heads, tokens, head_dim], scaled by its positions (Nakanishi 2025)."""
        numbers = torch.floor((self.paged_cache.positions.float() + 1) / self.floor_scale)
        scales = torch.log1p(numbers) * self.attn_scale + 1
        return (query * scales[:, None]).to(query.dtype)


def llama4_attention(module: nn.Module, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """query: [1, heads, tokens, head_dim]. Returns [1, tokens, heads, head_dim]."""
    assert isinstance(module, PagedLlama4Attention)
    if module.tuned:
        query = module.tune(query)
    return module.paged_cache.attend(module.layer_idx, query, module.variant), None


AttentionInterface.register(IMPLEMENTATION, llama4_attention)
SUBSTITUTES = {Llama4TextAttention: PagedLlama4Attention}
