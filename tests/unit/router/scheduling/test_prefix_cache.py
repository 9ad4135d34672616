import tracemalloc
from array import array
from collections import Counter
from random import Random
from time import perf_counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.timing import on_a_busy_machine
from tgi_server.router.scheduling.blocks import BlockPool
from tgi_server.router.scheduling.prefix_cache import Match, PrefixCache


def encode(tokens: list[int]) -> bytes:
    return array("I", tokens).tobytes()


class Sharer:
    """A pool, a cache on it, and what each block really holds: a tuple of all tokens up to each entry's."""

    def __init__(self, blocks: int = 20, block_size: int = 4) -> None:
        self.pool = BlockPool(blocks)
        self.cache = PrefixCache(self.pool, block_size)
        self.size = block_size
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.held: list[list[int]] = []

    def compute(self, tokens: list[int], *, keep: bool = True, fresh: bool = False, space: str = "") -> list[int]:
        """Computes `tokens` in new blocks, and offers them to the cache. Returns the blocks."""
        needed = -(-len(tokens) // self.size)
        self.cache.evict(max(0, needed - self.pool.free))
        blocks = self.pool.take(needed)
        for position in range(len(tokens)):
            place = blocks[position // self.size], position % self.size
            self.content[place] = (*map(ord, space), *tokens[: position + 1])
        self.cache.insert(space, encode(tokens), blocks, fresh=fresh)
        if keep:
            self.held.append(blocks)
        else:
            self.cache.released(self.pool.release(blocks))
        return blocks

    def match(self, tokens: list[int], space: str = "") -> Match:
        """Looks `tokens` up, and checks that the blocks hold what the match says."""
        found = self.cache.match(space, encode(tokens))
        assert len(found.blocks) == -(-found.tokens // self.size)
        for position in range(found.tokens):
            place = found.blocks[position // self.size], position % self.size
            assert self.content[place] == (*map(ord, space), *tokens[: position + 1])
        return found

    def check(self) -> None:
        self.pool.check(Counter(block for blocks in self.held for block in blocks), self.cache.check())


def test_finds_what_was_kept_to_the_token() -> None:
    sharer = Sharer()
    sharer.compute([1, 2, 3, 4, 5, 6], keep=False)
    assert sharer.match([1, 2, 3, 4, 5, 6, 7]).tokens == 6
    assert sharer.match([1, 2, 3, 4, 5, 9]).tokens == 5
    assert sharer.match([1, 2, 9]).tokens == 2
    assert sharer.match([9]).tokens == 0
    assert sharer.match([]).tokens == 0


def test_texts_part_inside_a_block() -> None:
    sharer = Sharer()
    first = sharer.compute([1, 2, 3, 4, 5, 6], keep=False)
    second = sharer.compute([1, 2, 3, 4, 5, 7, 8], keep=False)
    assert sharer.match([1, 2, 3, 4, 5, 6]).blocks == first
    assert sharer.match([1, 2, 3, 4, 5, 7, 8]).blocks == [first[0], second[1]]
    sharer.check()


def test_what_followed_a_text_is_told_by_its_latest_use() -> None:
    sharer = Sharer()

    def following(tokens: list[int], most: int, space: str = "") -> list[int]:
        return array("I", sharer.cache.continuation(space, encode(tokens), most)).tolist()

    sharer.compute([1, 2, 3, 4, 5, 6], keep=False)
    assert following([1, 2, 3], 9) == [4, 5, 6]
    assert following([1, 2, 3], 2) == [4, 5]
    assert following([1, 2, 3, 4, 5, 6], 9) == following([1, 2, 9], 9) == following([9], 9) == following([], 9) == []
    assert following([1, 2, 3], 9, space="other") == []
    sharer.compute([1, 2, 3, 4, 7, 8, 9], keep=False)
    assert following([1, 2, 3], 9) == [4, 7, 8, 9]
    sharer.match([1, 2, 3, 4, 5])
    assert following([1, 2], 9) == [3, 4, 5, 6]
    sharer.check()


def test_a_longer_text_of_the_same_sequence_lengthens_the_edge() -> None:
    sharer = Sharer()
    blocks = sharer.compute([1, 2, 3, 4, 5, 6])
    sharer.content[blocks[1], 2] = (1, 2, 3, 4, 5, 6, 7)
    sharer.cache.insert("", encode([1, 2, 3, 4, 5, 6, 7]), blocks)
    assert sharer.match([1, 2, 3, 4, 5, 6, 7]).tokens == 7
    sharer.check()


def test_spaces_have_nothing_in_common() -> None:
    sharer = Sharer()
    sharer.compute([1, 2, 3], keep=False, space="a")
    assert sharer.match([1, 2, 3]).tokens == 0
    assert sharer.match([1, 2, 3], space="a").tokens == 3


def test_what_the_call_being_built_computes_can_be_used_by_the_next() -> None:
    sharer = Sharer()
    sharer.compute([1, 2, 3, 4], keep=False)
    blocks = sharer.compute([1, 2, 3, 4, 5, 6, 7, 8, 9], fresh=True)
    found = sharer.match([1, 2, 3, 4, 5, 6, 7])
    assert (found.tokens, found.pending) == (4, 3)
    sharer.cache.sent()
    found = sharer.match([1, 2, 3, 4, 5, 6, 7])
    assert (found.tokens, found.pending) == (7, 0)
    assert found.blocks[1] == blocks[1]


def test_a_fresh_edge_that_is_split_stays_fresh_on_both_sides() -> None:
    sharer = Sharer()
    sharer.compute([1, 2, 3, 4, 5, 6, 7, 8], fresh=True)
    sharer.compute([1, 2, 3, 4, 5, 9], fresh=True)
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 9], [1, 2, 3]):
        found = sharer.match(tokens)
        assert (found.tokens, found.pending) == (0, len(tokens))
    sharer.cache.sent()
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 9], [1, 2, 3]):
        assert sharer.match(tokens).tokens == len(tokens)


def test_an_edge_that_is_fresh_at_its_end_is_split_before_and_behind() -> None:
    for at in (2, 6):
        sharer = Sharer(block_size=2)
        blocks = sharer.compute([1, 2, 3, 4])
        more = sharer.pool.take(2)
        sharer.cache.insert("", encode([1, 2, 3, 4, 5, 6, 7, 8]), blocks + more, fresh=True)
        sharer.compute([*range(1, at + 1), 9], fresh=True)
        found = sharer.match([1, 2, 3, 4, 5, 6, 7, 8])
        assert (found.tokens, found.pending) == (4, 4)


def test_the_least_recently_used_goes_first() -> None:
    sharer = Sharer(blocks=3, block_size=2)
    for token in (1, 2, 3):
        sharer.compute([token, token], keep=False)
    sharer.match([1, 1])
    sharer.cache.evict(1)
    assert [sharer.match([token, token]).tokens for token in (1, 2, 3)] == [2, 0, 2]
    sharer.check()


def test_a_long_text_is_given_up_from_its_end() -> None:
    sharer = Sharer(blocks=4, block_size=2)
    sharer.compute([1, 2, 3, 4, 5, 6, 7], keep=False)
    sharer.cache.evict(2)
    assert sharer.match([1, 2, 3, 4, 5, 6, 7]).tokens == 4
    assert sharer.pool.free == 2
    sharer.check()


def test_blocks_in_use_are_not_given_up() -> None:
    sharer = Sharer(blocks=6, block_size=2)
    sharer.compute([1, 2, 3, 4])
    sharer.compute([5, 6, 7, 8], keep=False)
    sharer.cache.evict(6)
    assert sharer.pool.free == 4
    assert sharer.match([1, 2, 3, 4]).tokens == 4
    assert sharer.match([5, 6]).tokens == 0
    sharer.cache.released(sharer.pool.release(sharer.held.pop()))
    sharer.cache.evict(6)
    assert sharer.pool.free == 6


def test_idle_blocks_above_those_in_use_can_be_had() -> None:
    sharer = Sharer(blocks=4, block_size=2)
    sharer.compute([1, 2, 3, 4], keep=False)
    sharer.compute([1, 2, 3, 4, 5])  # in blocks of its own, though the cache has most of it
    assert sharer.pool.free == 0 or sharer.pool.idle
    sharer.cache.evict(4)
    assert sharer.pool.available == sharer.pool.free
    sharer.check()


def test_spaces_that_come_and_go_leave_nothing_behind() -> None:
    sharer = Sharer()
    for number in range(1000):
        sharer.match([1, 2, 3], space=f"looked up {number}")
        sharer.compute([1, 2, 3], keep=False, space=f"kept {number}")
    assert len(sharer.cache._roots) <= sharer.pool.size
    assert len(sharer.cache._leaves) <= sharer.pool.size
    sharer.check()


@on_a_busy_machine
def test_a_long_prompt_is_matched_quickly() -> None:
    tokens = [1 + position % 5000 for position in range(30_000)]
    sharer = Sharer(blocks=4000, block_size=16)
    sharer.cache.insert("", encode(tokens), sharer.pool.take(1875))
    changed = [*tokens[:29_000], 7, *tokens[29_001:]]
    encoded = encode(changed)
    started = perf_counter()
    for _ in range(20):
        assert sharer.cache.match("", encoded).tokens == 29_000
    assert (perf_counter() - started) / 20 < 0.005


class Texts(RuleBasedStateMachine):
    """Texts of few different tokens are computed, kept, given up and looked up in any order."""

    texts = st.lists(st.integers(1, 2), min_size=1, max_size=14)

    @initialize(blocks=st.integers(8, 30), block_size=st.integers(1, 5))
    def start(self, blocks: int, block_size: int) -> None:
        self.sharer = Sharer(blocks, block_size)
        self.kept: list[list[int]] = []
        self.evicted = False

    @rule(tokens=texts, keep=st.booleans())
    def compute(self, tokens: list[int], keep: bool) -> None:
        sharer = self.sharer
        needed = -(-len(tokens) // sharer.size)
        if needed > sharer.pool.available:
            return
        self.evicted |= needed > sharer.pool.free
        sharer.compute(tokens, keep=keep)
        self.kept.append(tokens)
        assert sharer.match(tokens).tokens == len(tokens), "what was just computed is there"

    @precondition(lambda self: self.sharer.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.sharer.held
        blocks = held.pop(data.draw(st.integers(0, len(held) - 1)))
        self.sharer.cache.released(self.sharer.pool.release(blocks))

    @rule(blocks=st.integers(1, 4))
    def evict(self, blocks: int) -> None:
        pool = self.sharer.pool
        expected = min(pool.free + blocks, pool.available)
        self.evicted |= pool.idle > 0
        self.sharer.cache.evict(blocks)
        assert pool.free >= expected

    @rule(tokens=texts)
    def look_up(self, tokens: list[int]) -> None:
        longest = max((_in_common(tokens, text) for text in self.kept), default=0)
        found = self.sharer.match(tokens).tokens
        assert found <= longest if self.evicted else found == longest

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "sharer"):
            self.sharer.check()


def _in_common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


TestTexts = Texts.TestCase
TestTexts.settings = settings(stateful_step_count=30, deadline=None)


def test_the_tree_takes_memory_in_proportion_to_the_blocks() -> None:
    """However texts part, and however many have been forgotten. The highest found is 850 bytes for each block."""
    blocks, size = 1_000, 16
    pool = BlockPool(blocks)
    cache = PrefixCache(pool, size)
    chooser = Random(0)
    taken: list[int] = []
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for turn in range(4 * blocks):
            tokens = encode([chooser.randrange(2) for _ in range(size)])
            cache.match("", tokens)
            cache.evict(max(0, 1 - pool.free))
            held = pool.take(1)
            cache.insert("", tokens, held)
            cache.released(pool.release(held))
            if turn % blocks == blocks - 1:
                taken.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert max(taken) < 1_500 * blocks
    assert taken[-1] < 1.3 * taken[1]
