"""What the running batch may hold in the shards' memory; `PagedMemory` and `PaddedMemory` are the two kinds."""

from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from tgi_server.router.errors import InvalidRequest
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

    def check_length(self, sequence: Sequence) -> None:
        """Raises InvalidRequest when the sequence, at its longest, does not fit even while nothing else runs."""

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

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        """Makes the books anew from what `sequences`, all that are left, hold. Nothing else is kept, or cached."""

    def check(self, sequences: Iterable[Sequence]) -> None:
        """`sequences`: all that hold something. Raises AssertionError when the books are wrong."""


def check_fits(needed: int, tokens: int) -> None:
    """Raises InvalidRequest when a request needs more tokens of KV cache than there are."""
    if needed > tokens:
        raise InvalidRequest(f"the request needs {needed:,} tokens of KV cache; the cache has {tokens:,}")
