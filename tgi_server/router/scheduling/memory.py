"""What the running batch may hold in the shards' memory; `PagedMemory` and `PaddedMemory` are the two kinds."""

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from tgi_server.router.scheduling.sequence import Sequence


class Verdict(Enum):
    """What became of a request that asked to be admitted."""

    ADMITTED = "admitted"
    FULL = "full"  # there is no room now
    LATER = "later"  # the call being built computes what it can share after that


class Memory(Protocol):
    """Memory of the shards, in KV slots (tokens). Sequences hold some from `admit` to `release`.

    block_size: tokens of a block, 0 where there are no blocks. chunks: whether a prompt may be computed in parts.
    """

    block_size: int
    chunks: bool

    @property
    def held_tokens(self) -> int:
        """What sequences hold."""

    @property
    def cached_tokens(self) -> int:
        """What is kept for prompts to come, and given up when sequences need it."""

    def can_ever_hold(self, sequence: Sequence) -> bool:
        """Whether the sequence fits at its longest, while nothing else runs."""

    def admit(self, sequence: Sequence, budget: int) -> Verdict:
        """Gives the sequence what its known tokens need, at most `budget` tokens, and finds cached ones.

        A sequence that can ever be held is admitted, whatever the budget, while no other holds anything.
        """

    def can_grow(self, sequences: int) -> bool:
        """Whether that many sequences can have one block more each."""

    def grow(self, sequence: Sequence) -> int:
        """One block more for a sequence; `can_grow` has been asked. Returns the block."""

    def computed(self, sequence: Sequence) -> None:
        """The call being built computes tokens of the sequence's prompt, as its `computed` says."""

    def sent(self) -> None:
        """The call being built has been sent; the shards run later calls after it."""

    def release(self, sequence: Sequence) -> None:
        """The sequence holds nothing any more. Whoever gets it next uses it in later calls only."""

    def reset(self) -> None:
        """The shards have forgotten everything, and no sequence is left."""

    def check(self, sequences: Iterable[Sequence]) -> None:
        """`sequences`: all that hold something. Raises AssertionError when the books are wrong."""
