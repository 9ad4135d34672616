"""Multi-head latent attention: the cache has a token's latent and the rotated part of its keys, once for all heads.

The families' modules, DeepSeek-V2's and those made after it, hand both to the cache before they make the keys and
values of all heads of them.
"""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from tgi_server.engine.backends.attention.base import AttentionVariant, Latents
from tgi_server.engine.backends.attention.paged_cache import PagedCache

IMPLEMENTATION = "oatmill_paged_latents"


def substitute(module: nn.Module) -> type[nn.Module] | None:
    """Returns the class that replaces a module's; None: it stays."""
    if not hasattr(module, "expand_kv"):
        return None
    return type(f"Paged{type(module).__name__}", (_PagedLatentAttention, type(module)), {})


class _PagedLatentAttention(nn.Module):
    """Attends to latents. The weights that make keys and values of them are `variant`'s."""

    paged_cache: PagedCache
    variant: AttentionVariant

    def prepare(self) -> None:
        own: Any = self
        size, weight = own.qk_nope_head_dim, own.kv_b_proj.weight.to(own.kv_a_layernorm.weight.dtype)
        self._modules = {name: module for name, module in self._modules.items() if name != "kv_b_proj"}
        heads = weight.unflatten(0, (-1, size + own.v_head_dim))
        keys, values = heads[:, :size].contiguous(), heads[:, size:].mT.contiguous()
        self.variant = AttentionVariant(scaling=float(own.scaling), latents=Latents(keys, values))

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both as they are: attention finds them in the cache."""
        return kv_nope, k_rot


def latent_attention(module: nn.Module, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """query: [1, heads, tokens, size]. Returns [1, tokens, heads, value_dim]."""
    own: Any = module
    cache: PagedCache = own.paged_cache
    return cache.attend(own.layer_idx, query, own.variant), None


AttentionInterface.register(IMPLEMENTATION, latent_attention)
