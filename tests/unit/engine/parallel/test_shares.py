"""Each shard has its own heads, rows or columns; all shards together have everything once."""

from itertools import chain

import pytest

from tgi_server.engine.errors import UnsupportedModel
from tgi_server.engine.parallel import shares
from tgi_server.engine.parallel.shares import Heads, Share, share_of


def all_shares(heads: Heads, world_size: int) -> list[Share]:
    return [share_of(rank, world_size, heads) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("heads", "world_size"), [(Heads(8, 8), 2), (Heads(12, 4), 3), (Heads(6, 3), 2), (Heads(8, 2), 8)]
)
def test_every_query_head_has_one_shard_and_attends_to_a_head_that_is_there(heads: Heads, world_size: int) -> None:
    parts = all_shares(heads, world_size)
    assert list(chain(*(share.queries for share in parts))) == list(range(heads.queries))
    group = heads.queries // heads.keys
    for share in parts:
        assert {query // group for query in share.queries} == set(share.keys)


def test_more_shards_than_kv_heads_have_copies_of_them() -> None:
    parts = all_shares(Heads(8, 2), 4)
    assert [list(share.keys) for share in parts] == [[0], [0], [1], [1]]
    assert [share.copies for share in parts] == [2] * 4


def test_a_number_of_shards_that_leaves_one_without_heads_is_refused() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"2 KV heads cannot be split over 3 shards; --num-shard may be 1 to 2, 4"
    ):
        share_of(0, 3, Heads(8, 2))


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        (shares.parts, 11),
        (shares.halves, 24),
        (shares.pairs, 24),
        (shares.query_heads, 32),
        (shares.key_heads, 16),
        (shares.queries_keys_values, 4 * (8 + 2 * 4)),
        (shares.grouped_queries_keys_values, 4 * (8 + 2 * 4)),
        (shares.sections((8, shares.query_heads), (16, shares.key_heads), (5, shares.parts)), 29),
        (shares.grouped_values(3, 2, 5), 4 * (3 + 2 * 2 + 2 * 5)),
    ],
)
def test_all_shards_together_have_each_index_once(layout: shares.Layout, size: int) -> None:
    indices = [index for share in all_shares(Heads(8, 4), 2) for part in layout(share, size) for index in part]
    assert sorted(indices) == list(range(size))


def test_parts_of_the_vocabulary_are_equal_and_may_go_past_its_end() -> None:
    parts = [shares.vocabulary(share, 11) for share in all_shares(Heads(8, 4), 2)]
    assert parts == [[range(6)], [range(6, 12)]]
