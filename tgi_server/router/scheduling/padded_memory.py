"""Models without KV blocks: a batch is a rectangle, as long as its longest sequence for every row."""

from collections.abc import Iterable

from tgi_server.router.scheduling.memory import Verdict, check_fits
from tgi_server.router.scheduling.sequence import Sequence


class PaddedMemory:
    """Counts rows times the longest sequence at its end, so that a batch that was admitted always fits.

    Nothing is shared or preempted, and prompts are computed whole.
    """

    block_size = 0
    chunks = False
    cached_tokens = 0

    def __init__(self, max_batch_total_tokens: int) -> None:
        self._capacity = max_batch_total_tokens
        self._lengths: dict[int, int] = {}  # of each sequence at its end, in tokens

    @property
    def held_tokens(self) -> int:
        return len(self._lengths) * max(self._lengths.values(), default=0)

    def check_length(self, sequence: Sequence) -> None:
        check_fits(sequence.max_total_tokens, self._capacity)

    def admit(self, sequence: Sequence, budget: int) -> Verdict:
        longest = max(sequence.max_total_tokens, *self._lengths.values(), 0)
        if self._lengths and (len(self._lengths) + 1) * longest - self.held_tokens > budget:
            return Verdict.FULL
        self._lengths[sequence.id] = sequence.max_total_tokens
        return Verdict.ADMITTED

    def can_grow(self, sequences: int) -> bool:
        return True

    def grow(self, sequence: Sequence) -> int:
        raise AssertionError("padded sequences have their memory from the start")

    def computed(self, sequence: Sequence) -> None:
        """Nothing is kept for others."""

    def sent(self) -> None:
        """Nothing depends on the order of calls."""

    def release(self, sequence: Sequence) -> None:
        del self._lengths[sequence.id]

    def rebuild(self, sequences: Iterable[Sequence]) -> None:
        self._lengths = {sequence.id: sequence.max_total_tokens for sequence in sequences}

    def check(self, sequences: Iterable[Sequence]) -> None:
        assert {sequence.id for sequence in sequences} == set(self._lengths), "rows that nobody has, or the reverse"
