"""KV blocks, handed out as sequences grow, with a prefix cache over what they held before."""

from collections import Counter
from collections.abc import Iterable

from tgi_server.router.scheduling.blocks import BlockPool
from tgi_server.router.scheduling.memory import PrefixCacheUse, Verdict
from tgi_server.router.scheduling.prefix_cache import Match, PrefixCache
from tgi_server.router.scheduling.sequence import BlockCopy, Sequence

# A request waits for the call being built if that computes at least so many tokens which it can share then.
_WORTH_WAITING_TOKENS = 64


class PagedMemory:
    """A sequence holds the blocks of its known tokens from admission on, and gets one more whenever it fills its last.

    The rule that makes sharing safe: the shards run calls in the order in which they were sent. So a block that is
    given up after one call was sent may be granted in the next, and what one call computes may be shared by the next,
    before either has been answered. The source of a block copy stays held, as part of the sequence's path.
    """

    chunks = True

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        self.block_size = block_size
        self.prefix_cache = PrefixCacheUse()
        self._enabled = prefix_cache
        self._num_blocks = num_blocks
        self.reset()

    def reset(self) -> None:
        self._pool = BlockPool(self._num_blocks)
        self._cache = PrefixCache(self._pool, self.block_size)

    @property
    def blocks_in_use(self) -> int:
        return self._pool.in_use

    @property
    def blocks_cached(self) -> int:
        return self._pool.idle

    @property
    def held_tokens(self) -> int:
        return self._pool.in_use * self.block_size

    def can_ever_hold(self, sequence: Sequence) -> bool:
        return self._blocks_of(max(sequence.max_total_tokens - 1, sequence.known)) <= self._num_blocks

    def admit(self, sequence: Sequence, budget: int) -> Verdict:
        match = self._match(sequence)
        if match.pending >= _WORTH_WAITING_TOKENS:
            return Verdict.LATER
        alone = self._pool.in_use == 0
        if not self._reserve(sequence, match, self._num_blocks if alone else budget // self.block_size):
            if not alone:
                return Verdict.FULL
            # What it shares would keep blocks in use that it has no use for itself; without, it fits.
            match = Match()
            self._reserve(sequence, match, self._num_blocks)
        self.prefix_cache.lookup_tokens += sequence.known
        self.prefix_cache.hit_tokens += match.tokens
        return Verdict.ADMITTED

    def can_grow(self, sequences: int) -> bool:
        return self._pool.available >= sequences

    def grow(self, sequence: Sequence) -> int:
        (block,) = self._take(1)
        sequence.blocks.append(block)
        return block

    def computed(self, sequence: Sequence) -> None:
        if self._enabled:
            path = self._insert(sequence, sequence.computed, fresh=True)
            self._pool.use(path)
            self._cache.released(self._pool.release(sequence.path))
            sequence.path = path

    def sent(self) -> None:
        self._cache.sent()

    def release(self, sequence: Sequence) -> None:
        if self._enabled and sequence.settled:
            self._insert(sequence, sequence.settled, fresh=False)
        self._cache.released(self._pool.release(sequence.blocks))
        self._cache.released(self._pool.release(sequence.path))
        sequence.blocks, sequence.path = [], []

    def forget(self, sequence: Sequence) -> None:
        self._cache.clear()
        self._pool.release(sequence.path)
        sequence.path = []

    def check(self, sequences: Iterable[Sequence]) -> None:
        held: Counter[int] = Counter()
        for sequence in sequences:
            assert len(set(sequence.blocks)) == len(sequence.blocks), f"request {sequence.id} has a block twice"
            held.update(sequence.blocks)
            held.update(sequence.path)
        self._pool.check(held, self._cache.check())

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _match(self, sequence: Sequence) -> Match:
        """At least the last known token is computed: it yields the next one."""
        wants_all_logits = sequence.request.prefill_logprobs and sequence.generated == 0
        if not self._enabled or wants_all_logits:
            return Match()
        return self._cache.match(sequence.request.adapter_id or "", sequence.tokens[: sequence.known - 1].tobytes())

    def _reserve(self, sequence: Sequence, match: Match, limit: int) -> bool:
        """Takes blocks for the known tokens, unless that puts more than `limit` blocks to use that were not."""
        pool = self._pool
        shared, partial = divmod(match.tokens, self.block_size)
        new = self._blocks_of(sequence.known) - shared
        available = pool.available
        pool.use(match.path)
        if new > pool.available or new + available - pool.available > limit:
            self._cache.released(pool.release(match.path))
            return False
        own = self._take(new)
        pool.use(match.blocks[:shared])
        sequence.blocks = match.blocks[:shared] + own
        sequence.path = match.path
        sequence.cached = sequence.computed = match.tokens
        sequence.copy = BlockCopy(match.blocks[shared], own[0], partial) if partial else None
        return True

    def _take(self, blocks: int) -> list[int]:
        short = blocks - self._pool.free
        if short > 0:
            self._cache.evict(short)
        return self._pool.take(blocks)

    def _insert(self, sequence: Sequence, tokens: int, *, fresh: bool) -> list[int]:
        space = sequence.request.adapter_id or ""
        return self._cache.insert(space, sequence.tokens[:tokens].tobytes(), sequence.blocks, fresh=fresh)
