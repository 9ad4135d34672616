from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tgi_server.router.scheduling.blocks import BlockPool


def test_all_blocks_but_the_shards_own_are_handed_out_once() -> None:
    pool = BlockPool(5)
    assert sorted(pool.take(2) + pool.take(3)) == [1, 2, 3, 4, 5]
    assert (pool.free, pool.available, pool.in_use) == (0, 0, 5)


def test_a_block_is_free_again_when_its_last_user_gives_it_up() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.use([block])
    assert pool.release([block]) == []
    assert pool.free == 1
    assert pool.release([block]) == []
    assert pool.free == 2


def test_a_cached_block_becomes_idle_then_free() -> None:
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.cache([block])
    assert pool.release([block]) == [block]
    assert (pool.free, pool.idle, pool.available, pool.in_use) == (1, 1, 2, 0)
    pool.uncache([block])
    assert (pool.free, pool.idle) == (2, 0)


def test_an_idle_block_that_is_used_again_is_not_available() -> None:
    pool = BlockPool(1)
    (block,) = pool.take(1)
    pool.cache([block])
    pool.release([block])
    pool.use([block])
    assert (pool.available, pool.in_use) == (0, 1)


def test_the_check_finds_a_leak_and_a_wrong_count() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.check(Counter([block]), Counter())
    with pytest.raises(AssertionError, match="users"):
        pool.check(Counter(), Counter())
    with pytest.raises(AssertionError, match="cached"):
        pool.check(Counter([block]), Counter([block]))


class Holders(RuleBasedStateMachine):
    """Sequences and a cache hold blocks in any order; the pool always knows who holds what."""

    @initialize(size=st.integers(1, 12))
    def start(self, size: int) -> None:
        self.pool = BlockPool(size)
        self.sequences: list[list[int]] = []
        self.cached: list[int] = []

    @precondition(lambda self: self.pool.free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        self.sequences.append(self.pool.take(data.draw(st.integers(1, self.pool.free))))

    @precondition(lambda self: self.sequences or self.cached)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        held = sorted({block for blocks in self.sequences for block in blocks} | set(self.cached))
        blocks = data.draw(st.lists(st.sampled_from(held), min_size=1, unique=True))
        self.pool.use(blocks)
        self.sequences.append(blocks)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        before = {block for others in self.sequences for block in others}
        assert set(self.pool.release(blocks)) == (set(blocks) - before) & set(self.cached)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def cache(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.sequences))
        self.pool.cache(blocks)
        self.cached += blocks

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def uncache(self, data: st.DataObject) -> None:
        self.pool.uncache([self.cached.pop(data.draw(st.integers(0, len(self.cached) - 1)))])

    @invariant()
    def the_books_agree(self) -> None:
        if hasattr(self, "pool"):
            held = Counter(block for blocks in self.sequences for block in blocks)
            self.pool.check(held, Counter(self.cached))
            assert self.pool.in_use == len(held)
            assert self.pool.available == self.pool.size - len(held)


TestHolders = Holders.TestCase
TestHolders.settings = settings(stateful_step_count=40, deadline=None)
