"""Layers around a slice of a layer, which bring together what the shards computed."""

from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.parallel.group import ShardGroup
from tgi_server.engine.parallel.shares import Share


class ShardedLayer(nn.Module):
    """A layer around `inner`, which is of `transformers` or of the engine, with this shard's slice of its weights."""

    def __init__(self, inner: Any, group: ShardGroup, share: Share) -> None:
        super().__init__()
        self.inner = inner
        self.group = group
        self.share = share

    @property
    def weight(self) -> Tensor:
        """The inner layer's weight; some models ask for its dtype or device."""
        return self.inner.weight

    @property
    def bias(self) -> Tensor | None:
        return getattr(self.inner, "bias", None)


class RowParallel(ShardedLayer):
    """A row-parallel layer: every shard computes a part of the sum. A bias is in the first shard's part alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.group.all_reduce(self.inner(*args, **kwargs).contiguous())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Returns residual + forward(x), where `inner` is a linear layer that has this method as well."""
        if self.share.rank == 0:
            return self.group.all_reduce(self.inner.add_to(residual, x).contiguous())
        return self.group.all_reduce(self.inner(x).contiguous())


class VocabParallelEmbedding(ShardedLayer):
    """An embedding of which every shard has a part of the vocabulary."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [...] int64. Returns [..., hidden_size]."""
        tokens = len(self.weight)
        local = token_ids - self.share.rank * tokens
        elsewhere = (local < 0) | (local >= tokens)
        hidden = self.inner(local.masked_fill(elsewhere, 0))
        return self.group.all_reduce(hidden.masked_fill(elsewhere.unsqueeze(-1), 0))


class VocabParallelHead(ShardedLayer):
    """A head of which every shard computes the logits of a part of the vocabulary, and gets all of them."""

    vocab_size: int

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., hidden_size]. Returns [..., vocab_size], the same bits in every shard."""
        logits = self.group.all_gather(self.inner(hidden))
        if logits.shape[-1] == self.vocab_size:
            return logits
        return logits[..., : self.vocab_size].contiguous()


class ShardedQueryNorm(ShardedLayer):
    """Root mean square normalisation over all heads, of which each shard has some."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., features of this shard]."""
        return self._normalise(x, copies=1, size=x.shape[-1] // len(self.share.queries) * self.share.heads.queries)

    def _normalise(self, x: Tensor, copies: int, size: int) -> Tensor:
        values = x.float()
        squares = self.group.all_reduce(values.pow(2).sum(-1, keepdim=True) / copies)
        normal = values * torch.rsqrt(squares / size + self.inner.variance_epsilon)
        return (self.weight * normal).to(x.dtype)


class ShardedKeyNorm(ShardedQueryNorm):
    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1] // len(self.share.keys) * self.share.heads.keys
        return self._normalise(x, copies=self.share.copies, size=size)
