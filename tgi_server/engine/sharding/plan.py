"""How a model is split: what becomes of each of its modules."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tgi_server.engine.sharding.layers import (
    Reduced,
    ShardedEmbedding,
    ShardedHead,
    ShardedLayer,
)
from tgi_server.engine.sharding.shares import Heads, Layout, Share, parts, vocabulary


@dataclass(frozen=True, slots=True)
class Slice:
    """A shard has a slice of the tensor along `axis`; where that is None, the first shard has all, the others zeros."""

    axis: int | None
    layout: Layout = parts

    def ranges(self, share: Share, size: int) -> list[range]:
        return self.layout(share, size)

    def shape(self, share: Share, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the slice of a tensor of that shape."""
        if self.axis is None:
            return shape
        size = sum(map(len, self.ranges(share, shape[self.axis])))
        return (*shape[: self.axis], size, *shape[self.axis + 1 :])


FIRST_ONLY = Slice(None)


@dataclass(frozen=True, slots=True)
class Split:
    """What becomes of a module. tensors: of its parameters, by name. layer: what is put around it, if anything."""

    tensors: Mapping[str, Slice]
    layer: type[ShardedLayer] | None = None


def column(layout: Layout = parts, *, transposed: bool = False) -> Split:
    """A linear layer of which each shard computes some outputs. transposed: weights are [inputs, outputs]."""
    return Split({"weight": Slice(1 if transposed else 0, layout), "bias": Slice(0, layout)})


def row(layout: Layout = parts, *, transposed: bool = False) -> Split:
    """A linear layer of which each shard has some inputs."""
    return Split({"weight": Slice(0 if transposed else 1, layout), "bias": FIRST_ONLY}, Reduced)


def embedding() -> Split:
    return Split({"weight": Slice(0, vocabulary)}, ShardedEmbedding)


def head() -> Split:
    return Split({"weight": Slice(0, vocabulary), "bias": Slice(0, vocabulary)}, ShardedHead)


@dataclass(frozen=True)
class ShardingPlan:
    """How the models of an architecture are split.

    heads: of the attention. attention: the last name of every attention module.
    splits: by the end of a module's path; `*` stands for a number. Paths may also be those of a checkpoint, where it
    has other names than the model.
    whole: modules with matrices that every shard has, by the end of their path.
    own_attention: whether the split model still computes the right thing with the attention of `transformers`.
    """

    heads: Heads
    attention: tuple[str, ...]
    splits: Mapping[str, Split]
    whole: tuple[str, ...] = ()
    own_attention: bool = True

    def split(self, path: str) -> Split | None:
        """What becomes of the module at a path."""
        match = self._pattern.search(path)
        return list(self.splits.values())[int(str(match.lastgroup)[1:])] if match else None

    def slice(self, name: str) -> Slice | None:
        """Of the tensor of that name, in a model or a checkpoint; None: every shard has all of it."""
        path, _, tensor = name.rpartition(".")
        split = self.split(path)
        return split.tensors.get(tensor) if split else None

    def is_whole(self, path: str) -> bool:
        return any(path == end or path.endswith(f".{end}") for end in self.whole)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        ends = (re.escape(end).replace(r"\*", r"\d+") for end in self.splits)
        return re.compile(r"(?:^|\.)(?:" + "|".join(f"(?P<s{i}>{end})" for i, end in enumerate(ends)) + r")$")
