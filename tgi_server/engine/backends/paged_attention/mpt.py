"""MPT: alibi, with slopes ordered in MPT's own way."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel

from tgi_server.engine.backends.attention.base import AttentionVariant
from tgi_server.engine.backends.attention.paged_cache import PagedCache
from tgi_server.engine.backends.paged_attention.alibi import interleaved_slopes, slopes_of

IMPLEMENTATION = "oatmill_paged_mpt"


def _placeholder_mask(device: torch.device, **_: Any) -> Tensor:
    """Returns a mask that nothing reads: MPT converts its mask to bool even when there is none."""
    return torch.zeros(1, dtype=torch.bool, device=device)


AttentionMaskInterface.register(IMPLEMENTATION, _placeholder_mask)


class PagedMptAttention(MptAttention):
    paged_cache: PagedCache

    def prepare(self) -> None:
        slopes = slopes_of(self, self.n_heads, partial(interleaved_slopes, bias_max=8)).to(self.Wqkv.weight.device)
        self.variant = AttentionVariant(scaling=self.softmax_scale, alibi_slopes=slopes)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """hidden_states: [1, tokens, hidden]. Returns the same shape."""
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (part.unflatten(2, (-1, self.head_dim)).transpose(1, 2) for part in mixed.chunk(3, dim=2))
        self.paged_cache.update(key, value, self.layer_idx)
        attended = self.paged_cache.attend(self.layer_idx, query, self.variant)
        return self.out_proj(attended.flatten(2)), None


class PagedMptModel(MptModel):
    def build_mpt_alibi_tensor(self, *_: Any, **__: Any) -> None:
        """Biases of every head and position, made anew in every pass: the attention above needs none."""


SUBSTITUTES = {MptAttention: PagedMptAttention, MptModel: PagedMptModel}
