"""The share of one shard in a model: attention heads, and rows or columns of matrices."""

from collections.abc import Callable
from dataclasses import dataclass

from tgi_server.engine.errors import InvalidWeights, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of query and KV heads of a model. Query head i attends to KV head i // (queries / keys).

    Recurrent layers are described in the same way: value heads (queries) share key heads, and Mamba-2's heads (queries)
    share the B and C of a group (keys). names: what errors call `queries` and `keys`.
    """

    queries: int
    keys: int
    names: tuple[str, str] = ("attention heads", "KV heads")


@dataclass(frozen=True, slots=True)
class Share:
    """The attention heads that shard `rank` of `world_size` computes.

    heads: all heads of the model. queries, keys: indices of this shard's query and KV heads. With more shards than KV
    heads, several shards have the same KV head.
    """

    rank: int
    world_size: int
    heads: Heads
    queries: range
    keys: range

    @property
    def copies(self) -> int:
        """Number of shards that have the same KV heads as this one, itself included."""
        return max(1, self.world_size // self.heads.keys)


# Returns a shard's indices of an axis of a given size, in order.
Layout = Callable[[Share, int], list[range]]


def share_of(rank: int, world_size: int, heads: Heads) -> Share:
    """Returns the heads of shard `rank`; heads are split as evenly as possible.

    Raises UnsupportedModel if there are more shards than KV heads and the KV heads cannot be copied to shards evenly.
    """
    group = heads.queries // heads.keys
    if world_size <= heads.keys:
        keys = _part(heads.keys, rank, world_size)
        return Share(rank, world_size, heads, range(keys.start * group, keys.stop * group), keys)
    members = world_size // heads.keys
    if world_size % heads.keys or group < members:
        raise UnsupportedModel(
            f"{heads.queries} {heads.names[0]} with {heads.keys} {heads.names[1]} cannot be split over {world_size} "
            f"shards; --num-shard may be {_choices(heads)}"
        )
    key, member = divmod(rank, members)
    part = _part(group, member, members)
    return Share(rank, world_size, heads, range(key * group + part.start, key * group + part.stop), range(key, key + 1))


def parts(share: Share, size: int) -> list[range]:
    """Returns a contiguous part of the axis; the shards' parts are as equal as its size allows."""
    return [_part(size, share.rank, share.world_size)]


def halves(share: Share, size: int) -> list[range]:
    """Returns the same part of both halves of an axis: of concatenated gate and up projections."""
    part = _part(size // 2, share.rank, share.world_size)
    return [part, _shifted(part, size // 2)]


def pairs(share: Share, size: int) -> list[range]:
    """Returns a part of the axis that splits no pair of neighbours: of interleaved gate and up projections."""
    part = _part(size // 2, share.rank, share.world_size)
    return [_scaled(part, 2)]


def query_heads(share: Share, size: int) -> list[range]:
    """Returns the indices of this shard's query heads. The axis has size / queries consecutive indices per head."""
    return [_scaled(share.queries, size // share.heads.queries)]


def key_heads(share: Share, size: int) -> list[range]:
    """Returns the indices of this shard's KV heads. The axis has size / keys consecutive indices per head."""
    return [_scaled(share.keys, size // share.heads.keys)]


def of_heads(heads: Heads, layout: Layout) -> Layout:
    """Returns a layout for a layer whose head counts differ from those of the model's other layers."""
    return lambda share, size: layout(share_of(share.rank, share.world_size, heads), size)


def sections(*sections: tuple[int, Layout]) -> Layout:
    """Returns a layout for concatenated tensors. sections: the size and the layout of each tensor.

    The layout raises InvalidWeights for an axis whose size is not the sum of the sizes.
    """
    whole = sum(size for size, _ in sections)

    def layout(share: Share, size: int) -> list[range]:
        if size != whole:
            raise InvalidWeights(
                f"shapes differ from config.json: an axis to be split has {size} elements, not {whole}"
            )
        ranges, start = [], 0
        for length, own in sections:
            ranges += [_shifted(part, start) for part in own(share, length)]
            start += length
        return ranges

    return layout


def grouped_values(key_size: int, *value_sizes: int) -> Layout:
    """Returns a layout of groups, one for each KV head.

    A group has `key_size` indices for the key, then, for each value size, that many indices for each query head.
    """

    def layout(share: Share, _: int) -> list[range]:
        group = share.heads.queries // share.heads.keys
        ranges, unit = [], key_size + group * sum(value_sizes)
        for key in share.keys:
            start = key * unit
            ranges.append(range(start, start + key_size))
            start += key_size
            own = range(max(share.queries.start - key * group, 0), min(share.queries.stop - key * group, group))
            for size in value_sizes:
                ranges.append(_shifted(_scaled(own, size), start))
                start += group * size
        return [indices for indices in ranges if indices]

    return layout


def queries_keys_values(share: Share, size: int) -> list[range]:
    """Returns this shard's part of an axis of all query heads, then all keys, then all values."""
    queries, keys = share.heads.queries, share.heads.keys
    places = [share.queries, _shifted(share.keys, queries), _shifted(share.keys, queries + keys)]
    return [_scaled(place, size // (queries + 2 * keys)) for place in places]


def grouped_queries_keys_values(share: Share, size: int) -> list[range]:
    """Returns this shard's part of an axis that holds, for each KV head, its query heads, its key, and its value."""
    group = share.heads.queries // share.heads.keys
    unit = size // (share.heads.queries + 2 * share.heads.keys)
    places = []
    for key in share.keys:
        first = max(share.queries.start, key * group) + 2 * key
        last = min(share.queries.stop, (key + 1) * group) + 2 * key
        end = (key + 1) * (group + 2)
        places += [range(first, last), range(end - 2, end)]
    return [_scaled(place, unit) for place in places]


def vocabulary(share: Share, size: int) -> list[range]:
    """Returns an equal number of token ids for every shard. The last shards' ranges may extend past the end."""
    count = -(-size // share.world_size)
    return [range(share.rank * count, (share.rank + 1) * count)]


def _part(size: int, index: int, count: int) -> range:
    return range(size * index // count, size * (index + 1) // count)


def _scaled(indices: range, factor: int) -> range:
    return range(indices.start * factor, indices.stop * factor)


def _shifted(indices: range, by: int) -> range:
    return range(indices.start + by, indices.stop + by)


def _choices(heads: Heads) -> str:
    group = heads.queries // heads.keys
    copied = [heads.keys * members for members in range(2, group + 1)]
    upto = f"1 to {heads.keys}" if heads.keys > 1 else "1"
    return ", ".join([upto, *map(str, copied[:4])]) + (", ..." if len(copied) > 4 else "")
