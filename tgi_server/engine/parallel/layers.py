"""Layers that wrap a shard's slice of a layer and combine the results of all shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tgi_server.engine.parallel.group import ShardGroup
from tgi_server.engine.parallel.shares import Share


class ShardedLayer(nn.Module):
    """A layer around `inner`, a layer of `transformers` or of the engine that has this shard's slice of the weights."""

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
    """A row-parallel layer: each shard computes a partial sum; all-reduce adds them. Only shard 0 adds the bias."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.group.all_reduce(self.inner(*args, **kwargs).contiguous())

    def adapted(self, x: Tensor, rows: Any, *, residual: Tensor | None = None) -> Tensor:
        """Returns residual + forward(x) with LoRA deltas. `inner` has to be a packed linear layer."""
        own = residual if self.share.rank == 0 else None
        return self.group.all_reduce(self.inner.adapted(x, rows, residual=own).contiguous())


class VocabParallelEmbedding(ShardedLayer):
    """An embedding whose vocabulary is split over the shards."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [...] int64. Returns [..., hidden_size]."""
        tokens: int = self.inner.num_embeddings
        local = token_ids - self.share.rank * tokens
        elsewhere = (local < 0) | (local >= tokens)
        hidden = self.inner(local.masked_fill(elsewhere, 0))
        return self.group.all_reduce(hidden.masked_fill(elsewhere.unsqueeze(-1), 0))


class VocabParallelHead(ShardedLayer):
    """A language-model head: each shard computes the logits of its part of the vocabulary, then gathers all of them.

    Greedy rows need less: inside `apart` the logits are not gathered, and `argmax` exchanges one token a row and shard.
    """

    vocab_size: int
    _apart = False

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Makes the head return only the logits of this shard's part of the vocabulary, [..., part], in the context."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [..., hidden_size]. Returns [..., vocab_size], the same bits in every shard."""
        return self._joined(self.inner(hidden))

    def adapted(self, hidden: Tensor, rows: Any) -> Tensor:
        """Returns the logits with LoRA deltas. `inner` has to be a packed linear layer."""
        return self._joined(self.inner.adapted(hidden, rows))

    def argmax(self, part: Tensor) -> Tensor:
        """Returns the argmax of all shards' logits, int64 [rows], the first of equals.

        part: this shard's logits, [rows, part]. Each shard sends its best logit and that token's id, both as float32,
        which is exact for ids up to 2^24.
        """
        width = part.shape[-1]
        first = self.share.rank * width
        own = part[:, : max(self.vocab_size - first, 0)]  # the rest is padding
        if own.shape[1]:
            values, places = own.max(-1)
        else:
            values, places = part.new_full((len(part),), -torch.inf), torch.zeros_like(part[:, 0], dtype=torch.int64)
        pairs = torch.stack((values.float(), (places + first).float()), -1)
        logits, tokens = self.group.all_gather(pairs).unflatten(-1, (-1, 2)).unbind(-1)
        return tokens.gather(-1, logits.max(-1, keepdim=True).indices).squeeze(-1).long()

    def _joined(self, logits: Tensor) -> Tensor:
        return logits if self._apart else self.gathered(logits)

    def gathered(self, logits: Tensor) -> Tensor:
        """Returns all shards' logits, [..., vocab_size]. logits: this shard's, [..., part]."""
        logits = self.group.all_gather(logits)
        if logits.shape[-1] == self.vocab_size:
            return logits
        return logits[..., : self.vocab_size].contiguous()


class ShardedQueryNorm(ShardedLayer):
    """Root mean square normalisation over all query heads, which are split over the shards.

    whole_size: number of elements in all heads. copies: number of shards that have the same heads.
    """

    copies = 1

    @property
    def whole_size(self) -> int:
        return len(self.weight) // len(self.share.queries) * self.share.heads.queries

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., features of this shard]."""
        values = x.float()
        squares = self.group.all_reduce(values.pow(2).sum(-1, keepdim=True) / self.copies)
        normal = values * torch.rsqrt(squares / self.whole_size + self.inner.variance_epsilon)
        return (self.weight * normal).to(x.dtype)


class ShardedKeyNorm(ShardedQueryNorm):
    @property
    def copies(self) -> int:  # type: ignore[override]
        return self.share.copies

    @property
    def whole_size(self) -> int:
        return len(self.weight) // len(self.share.keys) * self.share.heads.keys


class ShardedGatedNorm(ShardedLayer):
    """The gated root mean square normalisation of Mamba-2, over groups of heads.

    If a group is split over several shards, all-reduce adds their sums of squares. `share` counts Mamba-2's heads as
    queries and its groups as keys.
    """

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [..., features of this shard]."""
        if self.share.copies == 1:
            return self.inner(x, gate)
        gate_last = getattr(self.inner, "norm_before_gate", False)
        values, gates = x.float(), nn.functional.silu(gate.float())
        if not gate_last:
            values = values * gates
        heads, group = self.share.heads, self.share.keys.start
        squares = values.new_zeros(*values.shape[:-1], heads.keys)
        squares[..., group] = values.pow(2).sum(-1)
        group_size = values.shape[-1] // len(self.share.queries) * (heads.queries // heads.keys)
        variance = self.group.all_reduce(squares)[..., group, None] / group_size
        normal = self.weight * (values * torch.rsqrt(variance + self.inner.variance_epsilon))
        return (normal * gates if gate_last else normal).to(x.dtype)
