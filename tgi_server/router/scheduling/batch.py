"""The sequences that the shards hold, and what each step does to them."""

from collections import defaultdict
from collections.abc import Iterator

from tgi_server.router.scheduling.sequence import Sequence

# Tokens for which leaping sequences get blocks ahead: more than most of the keys of an object.
_AHEAD = 32


class Batch:
    """Steps are numbered as they are sent; every step advances each sequence past its prompt by one token.

    So what a sequence needs at which step is known in advance, without waiting for its tokens: nothing here is looked
    at for each sequence in each step. Sequences with a grammar are the exception: they leap ahead by the tokens that
    the grammar forces, as far as they have blocks, so they are looked at, and given some blocks ahead.

    step: the number of the next step. answered: of the last one whose tokens are known. filter_due: the shards hold
    sequences that have left.
    """

    def __init__(self, block_size: int) -> None:
        """block_size: tokens of a block; 0 where there are no blocks."""
        self.id = 0
        self._block_size = block_size
        self.reset()

    def reset(self) -> None:
        """The shards have forgotten the batch: starts another, empty one."""
        self.id += 1
        self.step = 1
        self.answered = 0
        self.filter_due = False
        self._members: dict[int, Sequence] = {}  # oldest first: they join in the order in which they came
        self._prefilling: dict[int, Sequence] = {}
        self._leaping: dict[int, Sequence] = {}
        self._full_at: defaultdict[int, dict[int, Sequence]] = defaultdict(dict)  # by step and request

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def get(self, request_id: int) -> Sequence | None:
        return self._members.get(request_id)

    def ids(self) -> list[int]:
        return list(self._members)

    def youngest(self) -> Sequence:
        return next(reversed(self._members.values()))

    def prefilling(self) -> list[Sequence]:
        """Those whose known tokens have not all been computed, oldest first."""
        return list(self._prefilling.values())

    def decoding(self) -> bool:
        """Whether the next step yields tokens of sequences past their prompt. They may have ended unknown to us."""
        return any(
            sequence.first_step is not None and sequence.last_step >= self.step for sequence in self._members.values()
        )

    def join(self, sequence: Sequence) -> None:
        self._members[sequence.id] = sequence
        self._prefilling[sequence.id] = sequence

    def compute(self, sequence: Sequence, tokens: int) -> None:
        """The next step computes so many of the sequence's known tokens."""
        sequence.computed += tokens
        if sequence.remaining == 0:
            del self._prefilling[sequence.id]
            sequence.first_step = self.step
            if sequence.leaps:
                self._leaping[sequence.id] = sequence
            self._await_full(sequence)

    def growing(self) -> list[Sequence]:
        """Those that need a block more for the next step."""
        return [*self._short_of(0), *self._filling()]

    def leaping(self) -> list[Sequence]:
        """Those that may soon have a use for a block more."""
        return self._short_of(_AHEAD)

    def _filling(self) -> list[Sequence]:
        return [
            sequence
            for sequence in self._full_at.get(self.step, {}).values()
            if sequence.full_at == self.step and self._members.get(sequence.id) is sequence
        ]

    def grown(self, sequence: Sequence) -> None:
        """The sequence got the block that it needs for the next step."""
        self._await_full(sequence)

    def sent(self) -> None:
        """The next step has been sent."""
        self._full_at.pop(self.step, None)
        self.step += 1

    def leave(self, sequence: Sequence, *, ended_by_shards: bool) -> bool:
        """Whether the sequence was there. What steps on their way still yield for it is passed over."""
        if self._members.get(sequence.id) is not sequence:
            return False
        del self._members[sequence.id]
        self._prefilling.pop(sequence.id, None)
        self._leaping.pop(sequence.id, None)
        if not ended_by_shards:
            self.filter_due = True
        return True

    def _short_of(self, tokens: int) -> list[Sequence]:
        """Leaping sequences without blocks for the next step and so many tokens more.

        Each step after the last answered one computes the token that the one before it yielded; and what more that
        yields fits into the blocks that the sequence had then.
        """
        size = self._block_size
        if not size:
            return []
        short = []
        for sequence in self._leaping.values():
            assert sequence.first_step is not None
            unanswered = self.step - 1 - max(self.answered, sequence.first_step - 1)
            needed = min(len(sequence.tokens) + unanswered + tokens, sequence.max_total_tokens - 1)
            if len(sequence.blocks) * size < needed:
                short.append(sequence)
        return short

    def _await_full(self, sequence: Sequence) -> None:
        """Notes at which step the sequence's blocks are full, if it goes on for so long.

        `first_step` computes position `known` - 1, each later step the position after.
        """
        assert sequence.first_step is not None
        if not self._block_size or sequence.leaps:
            return
        step = sequence.first_step + len(sequence.blocks) * self._block_size - (sequence.known - 1)
        if step <= sequence.last_step:
            sequence.full_at = step
            self._full_at[step][sequence.id] = sequence
