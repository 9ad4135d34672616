"""The shards' memory that sequences hold: KV blocks for most models, rows of a padded batch for the others."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from enum import Enum
from itertools import takewhile
from time import perf_counter
from typing import Protocol

from tgi_server.contract import BlockCopy, Image, StateSave
from tgi_server.router.errors import InvalidRequest
from tgi_server.router.scheduling.blocks import BlockPool
from tgi_server.router.scheduling.prefix_cache import Match, PrefixCache, Space
from tgi_server.router.scheduling.prompt_history import PromptHistory
from tgi_server.router.scheduling.sequence import Sequence
from tgi_server.router.scheduling.snapshots import Snapshots

# In the prefix cache, numbers from here on stand for images, not tokens.
_FIRST_IMAGE_KEY = 2**31
# Maximum number of prompts that are protected from eviction at once.
_MOST_KEPT = 64
# A request waits for the call being built if that computes at least this many tokens that the request can then share.
_WORTH_WAITING_TOKENS = 64


class Verdict(Enum):
    """The result of asking for a request's admission."""

    ADMITTED = "admitted"
    FULL = "full"  # there is no room now
    LATER = "later"  # the call being built computes tokens that it can share afterwards


class Memory(Protocol):
    """Memory of the shards, counted in KV slots (tokens). Sequences hold some from `admit` to `release`.

    block_size: tokens of a KV block; 0: there are no blocks. chunks: True if prompts may be computed in chunks.
    caches: True if there is a prefix cache.
    """

    block_size: int
    chunks: bool
    caches: bool

    @property
    def held_tokens(self) -> int:
        """Number of KV slots that sequences hold."""

    @property
    def cached_tokens(self) -> int:
        """Number of KV slots that only the prefix cache holds."""

    def check_length(self, sequence: Sequence) -> None:
        """Raises InvalidRequest if the sequence at its maximum length needs more memory than there is."""

    def admit(self, sequence: Sequence, budget: int) -> Verdict:
        """Allocates memory for the sequence's known tokens, and finds those that are cached.

        budget: maximum number of new KV slots. While no other sequence holds memory, the budget does not apply.
        """

    def can_grow(self, sequences: int) -> bool:
        """Returns True if this many sequences can get one more block each."""

    def grow(self, sequence: Sequence) -> int:
        """Gives a sequence one more block. Returns the block. Call it only if `can_grow` returns True."""

    def computed(self, sequence: Sequence) -> None:
        """Records that the call being built computes the sequence's tokens up to `sequence.computed`."""

    def sent(self) -> None:
        """Records that the call being built has been sent."""

    def saves(self) -> Iterable[StateSave]:
        """Returns the states that the call being built has to copy into snapshots."""

    def keep(self, sequence: Sequence) -> None:
        """Protects the prompt of a sequence that has ended from eviction, if its request says so (`keep`)."""

    def cached(self, sequence: Sequence) -> int:
        """Returns how many of the sequence's known tokens are cached now."""

    def unseen(self, sequence: Sequence) -> list[Image]:
        """Returns the images of the sequence that are not completely in the prefix cache."""

    def forget(self, namespace: str) -> None:
        """Deletes everything that is cached under a namespace."""

    def release(self, sequence: Sequence) -> None:
        """Frees the memory of the sequence, for use in later calls."""

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        """Rebuilds the bookkeeping from `sequences`, all that are left. Empties the prefix cache."""

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError if the bookkeeping contradicts `sequences`, all sequences that hold memory."""


class PagedMemory:
    """KV blocks with a prefix cache. A sequence gets blocks for its known tokens on admission, then one at a time.

    Sharing is safe because the shards run calls in the order of sending. So a block that is released after one call was
    sent may be granted in the next call, and tokens that one call computes may be shared by the next, before either has
    been answered. The source of a block copy stays in use until the call that makes the copy is sent.
    """

    chunks = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        num_snapshots: int = 0,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """prefix_caching: True caches computed tokens for other sequences. num_snapshots: number of state snapshots;
        0: sequences have no recurrent states. clock: returns seconds.
        """
        self._num_snapshots = num_snapshots
        self._clock = clock
        # By namespace and name: a prompt that is protected from eviction, and until when. The latest is the last.
        self._kept: dict[tuple[str, str], tuple[float, Space, bytes]] = {}
        self.block_size = block_size
        self.caches = prefix_caching
        self._num_blocks = num_blocks
        self._sources: dict[Sequence, list[int]] = {}  # of the block copies that the call being built makes
        self._lent: Counter[int] = Counter()  # blocks that files are written from, or read into
        self._snapshots: Snapshots | None = None
        self._history = PromptHistory(block_size)
        self.rebuild(())

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        left = list(sequences)
        self._sources = {each: self._sources[each] for each in left if each in self._sources}
        self._pool = BlockPool(self._num_blocks, self._held(left))
        self._cache = PrefixCache(self._pool, self.block_size)
        lent = self._snapshots.lent if self._snapshots is not None else ()
        self._snapshots = Snapshots(self._num_snapshots, self.block_size, lent) if self._num_snapshots else None
        self._history.left(left)
        for sequence in left:
            sequence.saved = 0

    @property
    def held_tokens(self) -> int:
        return self._pool.in_use * self.block_size

    @property
    def cached_tokens(self) -> int:
        return self._pool.idle * self.block_size

    def check_length(self, sequence: Sequence) -> None:
        # The keys and values of the last token are not needed.
        _check_fits(max(sequence.max_total_tokens - 1, sequence.known), self._num_blocks * self.block_size)

    def admit(self, sequence: Sequence, budget: int) -> Verdict:
        match, snapshot = self._match(sequence)
        if match.pending >= _WORTH_WAITING_TOKENS:
            return Verdict.LATER
        alone = self._pool.in_use == 0
        if not self._reserve(sequence, match, snapshot, self._num_blocks if alone else budget // self.block_size):
            if not alone:
                return Verdict.FULL
            # The source of a copy was one block too many.
            whole = Match(match.tokens // self.block_size * self.block_size, blocks=match.blocks)
            self._reserve(sequence, whole, snapshot, self._num_blocks)
        self._history.look_up(sequence, space_of(sequence), match.tokens + match.unusable)
        return Verdict.ADMITTED

    def can_grow(self, sequences: int) -> bool:
        return self._pool.available >= sequences

    def grow(self, sequence: Sequence) -> int:
        # A reply has one snapshot, which moves along as blocks fill, because the next prompt begins with the reply.
        if not sequence.jumps:
            self._forget(sequence)
            sequence.saved = len(sequence.blocks) * self.block_size
            self._save(sequence, sequence.saved)
        (block,) = self._take(1)
        sequence.grow(block)
        return block

    def computed(self, sequence: Sequence) -> None:
        for length in [save_length for save_length in sequence.save_lengths if save_length <= sequence.computed]:
            sequence.save_lengths.remove(length)
            self._save(sequence, length)
        self._keep(sequence, sequence.computed, fresh=True)

    def sent(self) -> None:
        self._cache.sent()
        if self._snapshots is not None:
            self._snapshots.due.clear()
        for blocks in self._sources.values():
            self._give_up(blocks)
        self._sources.clear()

    def saves(self) -> Iterable[StateSave]:
        return [] if self._snapshots is None else self._snapshots.due.values()

    def _save(self, sequence: Sequence, length: int) -> None:
        if self._snapshots is not None:
            self._snapshots.save(sequence.id, space_of(sequence), sequence.beginning(length))

    def _forget(self, sequence: Sequence) -> None:
        """Drops the snapshot of the sequence's reply, if it has one."""
        if self._snapshots is not None and sequence.saved:
            self._snapshots.drop(space_of(sequence), sequence.beginning(sequence.saved))
        sequence.saved = 0

    def keep(self, sequence: Sequence) -> None:
        keep, request = sequence.request.keep, sequence.request
        if keep is None or not self.caches:
            return
        name = request.cache_namespace, keep.name
        self._kept.pop(name, None)
        if len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        prompt = sequence.beginning(sequence.prompt_tokens)
        self._kept[name] = self._clock() + keep.seconds, space_of(sequence), prompt

    def forget(self, namespace: str) -> None:
        self._kept = {name: kept for name, kept in self._kept.items() if name[0] != namespace}
        self._history.forget(namespace)
        for space in self._cache.spaces():
            if space[1] == namespace:
                self._cache.forget(space)

    def release(self, sequence: Sequence) -> None:
        if sequence.saved > len(sequence.tokens) - 2:  # by a step that may have found the sequence ended
            self._forget(sequence)
        sequence.saved = 0
        self._keep(sequence, sequence.settled, fresh=False)
        self._history.ended(sequence)
        self._give_up(sequence.blocks)

    @property
    def snapshots(self) -> Snapshots | None:
        """The state snapshots; None if sequences have no recurrent states."""
        return self._snapshots

    def cached_blocks(self, space: Space, tokens: bytes) -> list[int]:
        """Returns the full blocks of the longest cached prefix. tokens: 4 bytes each."""
        match = self._cache.match(space, tokens)
        return match.blocks[: match.tokens // self.block_size]

    def lend(self, blocks: Iterable[int]) -> None:
        """Marks cached blocks as in use until `give_back`, so that they are neither evicted nor overwritten."""
        held = list(blocks)
        self._pool.use(held)
        self._lent.update(held)

    def lend_free(self, number: int, spare: int) -> list[int]:
        """Returns `number` blocks to write into until `give_back`; none if fewer than `spare` would be left."""
        if self._pool.available < number + spare:
            return []
        blocks = self._take(number)
        self._lent.update(blocks)
        return blocks

    def give_back(self, blocks: Iterable[int]) -> None:
        """Returns blocks of `lend` or `lend_free`."""
        returned = list(blocks)
        self._lent -= Counter(returned)
        self._give_up(returned)

    def insert(self, space: Space, tokens: bytes, blocks: list[int]) -> None:
        """Caches a prefix whose keys and values are in lent blocks. tokens: 4 bytes each; they fill all blocks."""
        self._cache.insert(space, tokens, blocks)

    def check(self, sequences: Iterable[Sequence]) -> None:
        holding = list(sequences)
        for sequence in holding:
            assert len(set(sequence.blocks)) == len(sequence.blocks), f"request {sequence.id} has a block twice"
        self._pool.check(self._held(holding), self._cache.check())
        if self._snapshots is not None:
            self._snapshots.check()

    def _held(self, sequences: Iterable[Sequence]) -> Counter[int]:
        """Returns how often each block is held: by `sequences`, as the source of a planned block copy, or lent."""
        held = self._lent + Counter(block for blocks in self._sources.values() for block in blocks)
        for sequence in sequences:
            held.update(sequence.blocks)
        return held

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _match(self, sequence: Sequence) -> tuple[Match, int]:
        """Finds the cached prefix of the known tokens. The last of them is always computed, as that yields the next.

        Returns the match, and the snapshot of the state after it; 0 if there are no states, or nothing is cached.
        """
        if sequence.reports_prompt:
            return Match(), 0
        match = self._cache.match(space_of(sequence), sequence.beginning(sequence.known - 1))
        if self._snapshots is None:
            # A match that ends inside an image could be of another image: only some bytes of the digests were compared.
            whole = sequence.images.outside(match.tokens)
            return (match if whole == match.tokens else self._cut(match, whole)), 0
        length, snapshot = self._snapshots.find(space_of(sequence), sequence.beginning(match.tokens))
        lengths = self._snapshots.lengths(sequence.known, match.tokens)
        sequence.save_lengths = [each for each in lengths if each > length]
        blocks = match.blocks[: length // self.block_size]
        return Match(length, match.pending, blocks, match.tokens - length), snapshot

    def _cut(self, match: Match, tokens: int) -> Match:
        return Match(tokens, match.pending, match.blocks[: self._blocks_of(tokens)])

    def cached(self, sequence: Sequence) -> int:
        if sequence.reports_prompt or not self.caches:
            return 0
        return self._cache.match(space_of(sequence), sequence.beginning(sequence.known - 1)).tokens

    def unseen(self, sequence: Sequence) -> list[Image]:
        cached = self.cached(sequence)
        return [image for image in sequence.request.images if image.start + image.length > cached]

    def _reserve(self, sequence: Sequence, match: Match, snapshot: int, limit: int) -> bool:
        """Takes blocks for the known tokens. Returns False if that needs more than `limit` blocks not yet in use."""
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
        copy = BlockCopy(found[shared], own[0], partial) if partial else None
        sequence.admit(found[:shared] + own, match.tokens, copy, self._earlier_reply(sequence), snapshot)
        if partial:
            self._sources[sequence] = found[shared:]
        return True

    def _earlier_reply(self, sequence: Sequence) -> Iterable[int]:
        """Returns the reply to an earlier request with the same prompt, if shards can use it as a draft."""
        if not sequence.speculates:
            return ()
        prompt = sequence.beginning(sequence.prompt_tokens)
        following = array(
            "I", self._cache.continuation(space_of(sequence), prompt, sequence.request.options.stopping.max_new_tokens)
        )
        return takewhile(lambda token: token < _FIRST_IMAGE_KEY, following)

    def _take(self, blocks: int) -> list[int]:
        short = blocks - self._pool.free
        if short > 0:
            self._use_kept()
            self._cache.evict(short)
        return self._pool.take(blocks)

    def _use_kept(self) -> None:
        """Marks the protected prompts as the most recently used ones, so that they are evicted last."""
        now = self._clock()
        self._kept = {name: kept for name, kept in self._kept.items() if kept[0] > now}
        for _, space, tokens in self._kept.values():
            self._cache.match(space, tokens)

    def _give_up(self, blocks: list[int]) -> None:
        self._cache.released(self._pool.release(blocks))

    def _keep(self, sequence: Sequence, tokens: int, *, fresh: bool) -> None:
        """Caches the sequence's first tokens. fresh: True if the call being built computes the last of them."""
        if tokens and self.caches:
            self._cache.insert(space_of(sequence), sequence.beginning(tokens), sequence.blocks, fresh=fresh)
            self._history.cached(sequence, space_of(sequence), tokens)


class PaddedMemory:
    """Memory of padded batches: the number of rows times the maximum length of the longest sequence.

    So a batch that was admitted always fits. Nothing is shared or preempted, and prompts are not split into chunks.
    """

    block_size = 0
    chunks = caches = False
    cached_tokens = 0

    def __init__(self, max_batch_total_tokens: int) -> None:
        self._capacity = max_batch_total_tokens
        self._lengths: dict[int, int] = {}  # of each sequence at its end, in tokens

    @property
    def held_tokens(self) -> int:
        return len(self._lengths) * max(self._lengths.values(), default=0)

    def check_length(self, sequence: Sequence) -> None:
        _check_fits(sequence.max_total_tokens, self._capacity)

    def admit(self, sequence: Sequence, budget: int) -> Verdict:
        longest = max(sequence.max_total_tokens, *self._lengths.values(), 0)
        if self._lengths and (len(self._lengths) + 1) * longest - self.held_tokens > budget:
            return Verdict.FULL
        self._lengths[sequence.id] = sequence.max_total_tokens
        sequence.admit()
        return Verdict.ADMITTED

    def can_grow(self, sequences: int) -> bool:
        return True

    def grow(self, sequence: Sequence) -> int:
        raise AssertionError("a padded sequence has its memory from the start; the planner must not grow it")

    def computed(self, sequence: Sequence) -> None:
        """Does nothing: no tokens are cached for other sequences."""

    def sent(self) -> None:
        """Does nothing: no memory depends on the order of calls."""

    def saves(self) -> Iterable[StateSave]:
        return ()

    def keep(self, sequence: Sequence) -> None:
        """Does nothing: no tokens are cached for other sequences."""

    def cached(self, sequence: Sequence) -> int:
        return 0

    def unseen(self, sequence: Sequence) -> list[Image]:
        return list(sequence.request.images)

    def forget(self, namespace: str) -> None:
        """Does nothing: no tokens are cached for other sequences."""

    def release(self, sequence: Sequence) -> None:
        del self._lengths[sequence.id]

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        self._lengths = {sequence.id: sequence.max_total_tokens for sequence in sequences}

    def check(self, sequences: Iterable[Sequence]) -> None:
        assert {sequence.id for sequence in sequences} == set(self._lengths), "rows and sequences differ"


def _check_fits(needed: int, tokens: int) -> None:
    if needed > tokens:
        raise InvalidRequest(f"the request needs {needed:,} tokens of KV cache; the cache has {tokens:,}")


def space_of(sequence: Sequence) -> Space:
    """Returns the space of the prefix cache that the sequence uses: its adapter's key and its cache namespace."""
    return sequence.adapter.key if sequence.adapter else "", sequence.request.cache_namespace
