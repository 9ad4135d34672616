"""KV blocks, handed out as sequences grow, with a prefix cache over what they held before."""

from collections import Counter
from collections.abc import Iterable

from tgi_server.contract import BlockCopy
from tgi_server.router.scheduling.blocks import BlockPool
from tgi_server.router.scheduling.memory import Verdict, check_fits
from tgi_server.router.scheduling.prefix_cache import Match, PrefixCache, Space
from tgi_server.router.scheduling.sequence import Sequence

# A request waits for the call being built if that computes at least so many tokens which it can share then.
_WORTH_WAITING_TOKENS = 64


class PagedMemory:
    """A sequence holds the blocks of its known tokens from admission on, and gets one more whenever it fills its last.

    The rule that makes sharing safe: the shards run calls in the order in which they were sent. So a block that is
    given up after one call was sent may be granted in the next, and what one call computes may be shared by the next,
    before either has been answered. The source of a block copy stays in use until the call that copies it is sent.
    """

    chunks = True

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool) -> None:
        self.block_size = block_size
        self._enabled = prefix_cache
        self._num_blocks = num_blocks
        self._sources: list[int] = []  # of the block copies that the call being built makes
        self.rebuild(())

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        held = Counter(self._sources)
        for sequence in sequences:
            held.update(sequence.blocks)
        self._pool = BlockPool(self._num_blocks, held)
        self._cache = PrefixCache(self._pool, self.block_size)

    @property
    def held_tokens(self) -> int:
        return self._pool.in_use * self.block_size

    @property
    def cached_tokens(self) -> int:
        return self._pool.idle * self.block_size

    def check_length(self, sequence: Sequence) -> None:
        # Nobody asks for the keys and values of the last token.
        check_fits(max(sequence.max_total_tokens - 1, sequence.known), self._num_blocks * self.block_size)

    def admit(self, sequence: Sequence, budget: int) -> Verdict:
        match = self._match(sequence)
        if match.pending >= _WORTH_WAITING_TOKENS:
            return Verdict.LATER
        alone = self._pool.in_use == 0
        if not self._reserve(sequence, match, self._num_blocks if alone else budget // self.block_size):
            if not alone:
                return Verdict.FULL
            # The source of a copy was one block too many.
            match = Match(match.tokens // self.block_size * self.block_size, blocks=match.blocks)
            self._reserve(sequence, match, self._num_blocks)
        return Verdict.ADMITTED

    def can_grow(self, sequences: int) -> bool:
        return self._pool.available >= sequences

    def grow(self, sequence: Sequence) -> int:
        (block,) = self._take(1)
        sequence.blocks.append(block)
        return block

    def computed(self, sequence: Sequence) -> None:
        self._keep(sequence, sequence.computed, fresh=True)

    def sent(self) -> None:
        self._cache.sent()
        self._give_up(self._sources)
        self._sources = []

    def release(self, sequence: Sequence) -> None:
        self._keep(sequence, sequence.settled, fresh=False)
        self._give_up(sequence.blocks)
        sequence.blocks = []

    def check(self, sequences: Iterable[Sequence]) -> None:
        held = Counter(self._sources)
        for sequence in sequences:
            assert len(set(sequence.blocks)) == len(sequence.blocks), f"request {sequence.id} has a block twice"
            held.update(sequence.blocks)
        self._pool.check(held, self._cache.check())

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _match(self, sequence: Sequence) -> Match:
        """At least the last known token is computed: it yields the next one."""
        wants_all_logits = sequence.request.prefill_logprobs and sequence.generated == 0
        if not self._enabled or wants_all_logits:
            return Match()
        return self._cache.match(_space(sequence), sequence.tokens[: sequence.known - 1].tobytes())

    def _reserve(self, sequence: Sequence, match: Match, limit: int) -> bool:
        """Takes blocks for the known tokens, unless that puts more than `limit` blocks to use that were not."""
        pool = self._pool
        shared, partial = divmod(match.tokens, self.block_size)
        new = self._blocks_of(sequence.known) - shared
        found = match.blocks[: shared + 1] if partial else match.blocks[:shared]
        available = pool.available
        pool.use(found)
        if new > pool.available or new + available - pool.available > limit:
            self._give_up(found)
            return False
        own = self._take(new)
        sequence.blocks = found[:shared] + own
        sequence.cached = sequence.computed = match.tokens
        sequence.copy = BlockCopy(found[shared], own[0], partial) if partial else None
        self._sources += found[shared:]
        return True

    def _take(self, blocks: int) -> list[int]:
        short = blocks - self._pool.free
        if short > 0:
            self._cache.evict(short)
        return self._pool.take(blocks)

    def _give_up(self, blocks: list[int]) -> None:
        self._cache.released(self._pool.release(blocks))

    def _keep(self, sequence: Sequence, tokens: int, *, fresh: bool) -> None:
        """Offers the sequence's first tokens to those that come after it."""
        if self._enabled and tokens:
            self._cache.insert(_space(sequence), sequence.tokens[:tokens].tobytes(), sequence.blocks, fresh=fresh)


def _space(sequence: Sequence) -> Space:
    request = sequence.request
    return request.adapter_id, request.cache_namespace
