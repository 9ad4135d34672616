"""The allocator of KV blocks: the free list and the reference counts."""

from collections import Counter
from collections.abc import Iterable


class BlockPool:
    """Blocks 1 .. `blocks`; 0 is the shards' own.

    `users` counts the sequences that hold a block, `cached` how often the prefix cache does. A block is in use while a
    sequence holds it, idle while only the cache does, and otherwise free.
    """

    def __init__(self, blocks: int, held: Counter[int] | None = None) -> None:
        """held: how many sequences hold each block; none of them is cached."""
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
        """Blocks that sequences can get: free ones, and idle ones once the cache gives them up."""
        return len(self._free) + self.idle

    @property
    def in_use(self) -> int:
        return self.size - self.available

    def take(self, blocks: int) -> list[int]:
        """Returns free blocks, now in use once each. The caller has made sure that there are enough."""
        if blocks == 0:
            return []
        taken = self._free[-blocks:]
        del self._free[-blocks:]
        assert len(taken) == blocks, f"{blocks} blocks were requested and {len(taken)} were free"
        for block in taken:
            self.users[block] = 1
        return taken

    def use(self, blocks: Iterable[int]) -> None:
        """Notes that one more sequence holds each of these; they are in use or idle."""
        users = self.users
        for block in blocks:
            if users[block] == 0:
                self.idle -= 1
            users[block] += 1

    def release(self, blocks: Iterable[int]) -> list[int]:
        """Notes that one sequence fewer holds each of these blocks. Returns the blocks that became idle."""
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
        """Notes that the prefix cache holds each of these once more; they are in use, or in the cache already."""
        cached = self.cached
        for block in blocks:
            cached[block] += 1

    def uncache(self, blocks: Iterable[int]) -> None:
        """Notes that the prefix cache holds each of these once less; the last holder frees a block."""
        users, cached = self.users, self.cached
        for block in blocks:
            cached[block] -= 1
            if cached[block] == 0 and users[block] == 0:
                self.idle -= 1
                self._free.append(block)

    def check(self, held: Counter[int], cached: Counter[int]) -> None:
        """Compares the counts with what sequences and cache say that they hold. Raises AssertionError."""
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
