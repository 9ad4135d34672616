"""The allocator of KV blocks: the free list and the reference counts."""

from collections import Counter
from collections.abc import Iterable


class BlockPool:
    """KV blocks 1 .. `blocks`; the shards use block 0 themselves.

    users: number of sequences that hold each block. cached: how often the prefix cache holds each block. A block is in
    use while a sequence holds it, idle while only the cache holds it, and free otherwise.
    """

    def __init__(self, blocks: int, held: Counter[int] | None = None) -> None:
        """held: number of sequences that hold each block; no block is cached."""
        held = held or Counter()
        self.size = blocks
        self.users = [held[block] for block in range(blocks + 1)]
        self.cached = [0] * (blocks + 1)
        self.idle = 0
        self._free = [block for block in range(blocks, 0, -1) if not held[block]]

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Number of blocks that sequences can get: free ones, and idle ones, which the cache has to evict first."""
        return len(self._free) + self.idle

    @property
    def in_use(self) -> int:
        return self.size - self.available

    def take(self, blocks: int) -> list[int]:
        """Takes free blocks for one sequence. Returns them. There have to be enough."""
        if blocks == 0:
            return []
        taken = self._free[-blocks:]
        del self._free[-blocks:]
        assert len(taken) == blocks, f"{blocks} blocks were requested and {len(taken)} were free"
        for block in taken:
            self.users[block] = 1
        return taken

    def use(self, blocks: Iterable[int]) -> None:
        """Adds one sequence to the users of each block. The blocks have to be in use or idle."""
        users = self.users
        for block in blocks:
            if users[block] == 0:
                self.idle -= 1
            users[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Removes one sequence from the users of each block. Returns the blocks that became idle."""
        users, cached = self.users, self.cached
        idle = []
        for block in blocks:
            users[block] -= 1
            if users[block] == 0:
                if cached[block]:
                    idle.append(block)
                else:
                    self._free.append(block)
        self.idle += len(idle)
        return idle

    def cache(self, blocks: Iterable[int]) -> None:
        """Counts one more reference of the prefix cache to each block. The blocks have to be in use or cached."""
        cached = self.cached
        for block in blocks:
            cached[block] += 1

    def uncache(self, blocks: Iterable[int]) -> None:
        """Counts one reference less of the prefix cache to each block. Blocks without a holder become free."""
        users, cached = self.users, self.cached
        for block in blocks:
            cached[block] -= 1
            if cached[block] == 0 and users[block] == 0:
                self.idle -= 1
                self._free.append(block)

    def check(self, held: Counter[int], cached: Counter[int]) -> None:
        """Raises AssertionError if the counts differ from what the sequences and the prefix cache hold."""
        for name, counts, holders in (("users", self.users, held), ("cached", self.cached, cached)):
            booked = Counter({block: count for block, count in enumerate(counts) if count})
            assert booked == holders, f"{name}: booked but not held: {booked - holders}; not booked: {holders - booked}"
        free, holding = set(self._free), held.keys() | cached.keys()
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & holding, f"free but held: {free & holding}"
        assert len(free) + len(holding) == self.size, f"{self.size - len(free) - len(holding)} blocks have leaked"
        assert 0 not in free | holding, "block 0 is the shards' own"
        idle = len(cached.keys() - held.keys())
        assert self.idle == idle, f"{self.idle} blocks are booked as idle; {idle} are"
