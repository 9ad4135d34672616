"""Multi-head latent attention: the cache has a token's latent and the rotated part of its keys, once for all heads.

The families' modules, DeepSeek-V2's and those made after it, hand both to the cache before they make the keys and
values of all heads of them. Where attention is sparse (DeepSeek-V3.2, GLM-5), the key of the index stands behind them.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from tgi_server.engine.backends.attention.base import AttentionVariant, Selection, rotate, rotate_pairs
from tgi_server.engine.backends.attention.latents import latents_of
from tgi_server.engine.backends.attention.paged_cache import PagedCache

IMPLEMENTATION = "oatmill_paged_latents"
# Families whose index turns neighbouring elements.
_INTERLEAVED = "glm_moe_dsa"


def substitute(module: nn.Module) -> type[nn.Module] | None:
    """Returns the class that replaces a module's; None: it stays."""
    own = type(module)
    if hasattr(module, "expand_kv"):
        return type(f"Paged{own.__name__}", (_PagedLatentAttention, own), {})
    if hasattr(module, "index_topk") and hasattr(module, "weights_proj"):
        return type(f"Paged{own.__name__}", (_PagedIndexer, own), {})
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Indexed:
    """The keys of an index, [1, 1, tokens, size], of this pass, which attention gets in the place of chosen tokens."""

    selection: Selection
    key: Tensor


class _PagedIndexer(nn.Module):
    def prepare(self) -> None:
        own: Any = self
        self.weights_dtype = own.weights_proj.weight.dtype

    def forward(
        self, hidden_states: Tensor, q_resid: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
    ) -> _Indexed:
        """hidden_states, q_resid: [1, tokens, size]. position_embeddings: cosines and sines."""
        own: Any = self
        cosine, sine = (table[0].unsqueeze(1) for table in position_embeddings)
        turn = rotate_pairs if own.config.model_type == _INTERLEAVED else rotate
        query = turn(own.wq_b(q_resid)[0].unflatten(1, (own.n_heads, own.head_dim)), cosine, sine)
        key = turn(own.k_norm(own.wk(hidden_states))[0].unsqueeze(1), cosine, sine)
        weights = own.weights_proj(hidden_states.to(self.weights_dtype))[0].float()
        weights = weights * (own.n_heads**-0.5 * own.softmax_scale)
        selection = Selection(own.layer_idx, query, weights)
        return _Indexed(selection, key.transpose(0, 1).unsqueeze(0))


class _PagedLatentAttention(nn.Module):
    """Attends to latents. The weights that make keys and values of them are `variant`'s."""

    paged_cache: PagedCache
    variant: AttentionVariant

    def prepare(self) -> None:
        own: Any = self
        latents = latents_of(own)
        self._modules = {name: module for name, module in self._modules.items() if name != "kv_b_proj"}
        self.writes_cache = hasattr(own, "indexer")
        chosen = int(own.config.index_topk) if self.writes_cache else 0
        self.variant = AttentionVariant(scaling=float(own.scaling), latents=latents, chosen=chosen)

    def expand_kv(self, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
        """Returns both as they are: attention finds them in the cache."""
        return kv_nope, k_rot


def latent_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, indices: _Indexed | None = None, **__: Any
) -> tuple[Tensor, None]:
    """query: [1, heads, tokens, size]; key: latents, [1, 1, tokens, rank]; value: the rotated parts of keys.

    Returns [1, tokens, heads, value_dim].
    """
    own: Any = module
    cache, variant = own.paged_cache, own.variant
    if indices is not None:
        selection, index = indices.selection, indices.key
        index = index if selection.layer == own.layer_idx else torch.zeros_like(index)
        cache.write(own.layer_idx, key, torch.cat([value, index], dim=3))
        variant = replace(variant, selection=selection)
    return cache.attend(own.layer_idx, query, variant), None


def _placeholder_mask(device: torch.device, **_: Any) -> Tensor:
    """Returns a mask that nothing reads: models with an index take a part of their mask."""
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)


AttentionInterface.register(IMPLEMENTATION, latent_attention)
AttentionMaskInterface.register(IMPLEMENTATION, _placeholder_mask)
