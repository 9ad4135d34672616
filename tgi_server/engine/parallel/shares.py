"""The share of one shard in a model: attention heads, and rows or columns of matrices."""

from collections.abc import Callable
from dataclasses import dataclass

from tgi_server.engine.errors import InvalidWeights, UnsupportedModel


@dataclass(frozen=True, slots=True)
class Heads:
    """A model's attention heads. Query head i attends to KV head i // (queries / keys).

    The heads of a recurrent layer are described in the same way: value heads that share key heads, or the heads of
    Mamba-2 that share the B and C of a group. names: what both kinds are called in errors.
    """

    queries: int
    keys: int
    names: tuple[str, str] = ("attention heads", "KV heads")


@dataclass(frozen=True, slots=True)
class Share:
    """The share of shard `rank` of `world_size`.

    heads: all of the model's. queries, keys: the query and KV heads that this shard computes. Where there are more
    shards than KV heads, several shards have the same one.
    """

    rank: int
    world_size: int
    heads: Heads
    queries: range
    keys: range

    @property
    def copies(self) -> int:
        """The number of shards that have the same KV heads as this one, itself included."""
        return max(1, self.world_size // self.heads.keys)


# Returns the indices of an axis of a given size that a shard has, in their order.
Layout = Callable[[Share, int], list[range]]


def share_of(rank: int, world_size: int, heads: Heads) -> Share:
    """Splits heads as evenly as whole heads allow. Raises UnsupportedModel when a shard would have none."""
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
    """An equal part of the axis, as far as its size allows."""
    return [_part(size, share.rank, share.world_size)]


def halves(share: Share, size: int) -> list[range]:
    """Returns equal shares of both halves of a gate and an up projection that are concatenated."""
    part = _part(size // 2, share.rank, share.world_size)
    return [part, _shifted(part, size // 2)]


def pairs(share: Share, size: int) -> list[range]:
    """Returns an equal share of pairs of neighbours: of a gate and an up projection, interleaved."""
    part = _part(size // 2, share.rank, share.world_size)
    return [_scaled(part, 2)]


def query_heads(share: Share, size: int) -> list[range]:
    """The query heads, each the same number of indices; whatever belongs to a head may be interleaved there."""
    return [_scaled(share.queries, size // share.heads.queries)]


def key_heads(share: Share, size: int) -> list[range]:
    return [_scaled(share.keys, size // share.heads.keys)]


def of_heads(heads: Heads, layout: Layout) -> Layout:
    """Returns a layout for a layer whose head counts differ from those of the model's other layers."""
    return lambda share, size: layout(share_of(share.rank, share.world_size, heads), size)


def sections(*sections: tuple[int, Layout]) -> Layout:
    """Returns a layout for concatenated tensors. sections: the size and the layout of each.

    It raises InvalidWeights for an axis of another size.
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
    """Returns a layout of groups, one for each KV head: `key_size` indices, then the value sizes of each query head."""

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
    """All query heads, then all keys, then all values."""
    queries, keys = share.heads.queries, share.heads.keys
    places = [share.queries, _shifted(share.keys, queries), _shifted(share.keys, queries + keys)]
    return [_scaled(place, size // (queries + 2 * keys)) for place in places]


def grouped_queries_keys_values(share: Share, size: int) -> list[range]:
    """Each KV head's query heads, its key, and its value."""
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
    """An equal number of tokens for every shard; the last shard's may go past the end."""
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
