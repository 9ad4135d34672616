"""The plan by which a model is split: column- and row-parallel modules, and the slices of their tensors."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from tgi_server.engine.parallel.group import ShardGroup
from tgi_server.engine.parallel.layers import (
    RowParallel,
    ShardedLayer,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from tgi_server.engine.parallel.shares import Heads, Layout, Share, parts, share_of, vocabulary


@dataclass(frozen=True, slots=True)
class Slice:
    """A shard's slice of a tensor along `axis`. If `axis` is None, shard 0 has the whole tensor, the others zeros."""

    axis: int | None
    layout: Layout = parts

    def ranges(self, share: Share, size: int) -> list[range]:
        return self.layout(share, size)

    def shape(self, share: Share, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the slice of a tensor of shape `shape`."""
        if self.axis is None:
            return shape
        size = sum(map(len, self.ranges(share, shape[self.axis])))
        return (*shape[: self.axis], size, *shape[self.axis + 1 :])

    def of(self, whole: Tensor, share: Share) -> Tensor:
        """Returns the slice of a tensor."""
        assert self.axis is not None
        ranges = self.ranges(share, whole.shape[self.axis])
        return torch.cat([whole.narrow(self.axis, indices.start, len(indices)) for indices in ranges], self.axis)


FIRST_ONLY = Slice(None)


@dataclass(frozen=True, slots=True)
class Split:
    """The split of one module among the shards.

    tensors: the slices of its parameters and buffers, by name. layer: creates the layer that wraps the module; None: it
    is not wrapped. sizes: for attributes of the module that hold the size of a split axis, the layout of that axis.
    """

    tensors: Mapping[str, Slice]
    layer: Callable[[nn.Module, ShardGroup, Share], ShardedLayer] | None = None
    sizes: Mapping[str, Layout] = field(default_factory=dict)


def column_parallel(layout: Layout = parts, *, transposed: bool = False) -> Split:
    """Splits a linear layer by its outputs. transposed: the weight is [inputs, outputs]."""
    return Split({"weight": Slice(1 if transposed else 0, layout), "bias": Slice(0, layout)})


def row_parallel(layout: Layout = parts, *, transposed: bool = False) -> Split:
    """Splits a linear layer by its inputs. transposed: the weight is [inputs, outputs]."""
    return Split({"weight": Slice(0 if transposed else 1, layout), "bias": FIRST_ONLY}, RowParallel)


def vocab_parallel_embedding() -> Split:
    return Split({"weight": Slice(0, vocabulary)}, VocabParallelEmbedding)


def vocab_parallel_head() -> Split:
    return Split({"weight": Slice(0, vocabulary), "bias": Slice(0, vocabulary)}, VocabParallelHead)


@dataclass(frozen=True)
class ShardingPlan:
    """The splits of an architecture's modules, which are named by the end of their paths, such as `mlp.up_proj`.

    heads: the attention heads of most layers. attention: names of attention modules. layer_heads: heads of attention
    modules that have other numbers of heads.
    splits: the split of each module; `*` in a name stands for a number. Names may also be those of a checkpoint, if
    they differ from the model's.
    whole: names of modules whose matrices every shard has in full.
    """

    heads: Heads
    attention: tuple[str, ...]
    splits: Mapping[str, Split]
    whole: tuple[str, ...] = ()
    layer_heads: Mapping[str, Heads] = field(default_factory=dict)

    def share(self, path: str, share: Share) -> Share:
        """Returns this shard's share of the heads of the attention module at `path`. share: that of most layers."""
        for end, heads in self.layer_heads.items():
            if path.endswith(f".{end}"):
                return share_of(share.rank, share.world_size, heads)
        return share

    def split(self, path: str) -> Split | None:
        """Returns how the module at `path` is split; None if every shard has all of it."""
        match = self._pattern.search(path)
        return list(self.splits.values())[int(str(match.lastgroup)[1:])] if match else None

    def slice(self, name: str) -> Slice | None:
        """Returns the slice of the tensor of this name in the model or checkpoint; None: every shard has all of it."""
        path, _, tensor = name.rpartition(".")
        split = self.split(path)
        return split.tensors.get(tensor) if split else None

    def is_whole(self, path: str) -> bool:
        return _ends(path, self.whole)

    def is_attention(self, path: str) -> bool:
        return _ends(path, self.attention)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        ends = (re.escape(end).replace(r"\*", r"\d+") for end in self.splits)
        return re.compile(r"(?:^|\.)(?:" + "|".join(f"(?P<s{i}>{end})" for i, end in enumerate(ends)) + r")$")


def _ends(path: str, ends: tuple[str, ...]) -> bool:
    return any(path == end or path.endswith(f".{end}") for end in ends)
