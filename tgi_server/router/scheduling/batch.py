"""The sequences that wait for the shards, and the ones that the shards hold."""

import logging
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator

from tgi_server.contract import MOST_DRAFTED
from tgi_server.router.scheduling.adapter_registry import Adapter
from tgi_server.router.scheduling.memory import Memory, Verdict
from tgi_server.router.scheduling.sequence import Sequence

logger = logging.getLogger(__name__)

# Sequences with jump-forward or drafted tokens get blocks for this many tokens ahead: more than most JSON keys have.
_AHEAD = MOST_DRAFTED


class WaitingQueue:
    """Waiting sequences, sorted by `place`. The first is served first, unless its tenant has had more than another."""

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def get(self, request_id: int) -> Sequence | None:
        return self._by_id.get(request_id)

    def add(self, sequence: Sequence) -> None:
        self._by_id[sequence.id] = sequence
        insort(self._sequences, sequence, key=_place)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a sequence that was preempted, at its former place."""
        self.add(sequence)

    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def leave(self, sequence: Sequence) -> None:
        """Removes the sequence, if it waits."""
        if self._by_id.pop(sequence.id, None) is not None:
            del self._sequences[bisect_left(self._sequences, sequence.place, key=_place)]


def _place(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.place


class Batch:
    """The sequences that the shards hold, with their memory, and the effect of each step on them.

    Steps are numbered as they are sent; each advances every sequence past its prompt by one token. So the step at which
    a sequence needs its next block is known in advance, and no step looks at all sequences. Except sequences with a
    grammar, and all if the shards speculate: a step may advance these by several tokens, so each step looks at them.

    id: the batch id in calls to the shards. step: number of the next step. answered: number of the last step whose
    tokens are known. filter_due: True if the shards hold sequences that have left.
    """

    def __init__(self, memory: Memory, *, whole_images: bool = False) -> None:
        """whole_images: True if each image has to be computed in one step."""
        self.memory = memory
        self._whole_images = whole_images
        self.id = 0
        self.reset()

    def reset(self) -> None:
        """Starts a new, empty batch, after the shards have lost this one and all cached prefixes."""
        self.id += 1
        self.step = 1
        self.answered = 0
        self.filter_due = False
        self._members: dict[int, Sequence] = {}  # in the order in which they joined
        self._prefilling: dict[int, Sequence] = {}
        self._jumping: dict[int, Sequence] = {}
        self._full_at: defaultdict[int, list[Sequence]] = defaultdict(list)  # by step
        self._left_at: dict[Adapter, int] = {}  # the last step that was sent when a sequence with the adapter left
        self.memory.rebuild(())

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return self._members.get(sequence.id) is sequence

    def get(self, request_id: int) -> Sequence | None:
        return self._members.get(request_id)

    def ids(self) -> list[int]:
        return list(self._members)

    def prefilling(self) -> list[Sequence]:
        """Returns the sequences that still prefill: some of their known tokens have not been computed."""
        return list(self._prefilling.values())

    @property
    def replies(self) -> int:
        """Number of sequences past their prompt."""
        return len(self._members) - len(self._prefilling)

    def decoding(self) -> bool:
        """Returns True if the next step may yield a token of a sequence past its prompt: if one may still grow."""
        return any(
            sequence.first_step is not None and sequence.last_step >= self.step for sequence in self._members.values()
        )

    def uses(self, adapter: Adapter) -> bool:
        """Returns True while a sequence, or a step that has not been answered, uses the adapter."""
        if self._left_at.get(adapter, 0) > self.answered:
            return True
        self._left_at.pop(adapter, None)
        return any(sequence.adapter is adapter for sequence in self._members.values())

    def admit(self, sequence: Sequence, budget: int) -> Verdict:
        """Adds a sequence if memory has room for its known tokens. budget: maximum number of new KV slots for it."""
        verdict = self.memory.admit(sequence, budget)
        if verdict is Verdict.ADMITTED:
            self._members[sequence.id] = sequence
            self._prefilling[sequence.id] = sequence
        return verdict

    def compute(self, sequence: Sequence, budget: int) -> int:
        """Has the next step compute known tokens of the sequence. Returns how many.

        At most `budget`, but models without KV blocks compute all tokens at once, and some models whole images.
        """
        tokens = min(sequence.remaining, budget) if self.memory.chunks else sequence.remaining
        if self._whole_images and sequence.request.images:
            tokens = sequence.images.whole(sequence.computed, tokens)
        sequence.compute(tokens, self.step)
        if sequence.remaining == 0:
            del self._prefilling[sequence.id]
            if sequence.jumps:
                self._jumping[sequence.id] = sequence
            self._await_full(sequence)
        self.memory.computed(sequence)
        return tokens

    def growing(self) -> list[Sequence]:
        """Returns the sequences that need one more block for the next step."""
        size = self.memory.block_size
        filling = (sequence for sequence in self._full_at.get(self.step, ()) if sequence in self)
        # A sequence that was preempted meanwhile may be listed twice, or for a step that is too early.
        full = {
            sequence.id: sequence
            for sequence in filling
            if sequence.first_step and sequence.full_step(size) == self.step
        }
        return [*self._short_of(0), *full.values()]

    def closable(self) -> list[Sequence]:
        """Returns the sequences whose grammar has to complete the text before the deadline, and is not yet doing so."""
        return [sequence for sequence in self._jumping.values() if sequence.closes and not sequence.closing]

    def jumping(self) -> list[Sequence]:
        """Returns the sequences that drafts or jump-forward tokens may soon advance beyond their blocks."""
        return self._short_of(_AHEAD)

    def grow(self, sequence: Sequence) -> int:
        """Gives the sequence one more block. Returns the block."""
        block = self.memory.grow(sequence)
        self._await_full(sequence)
        return block

    def sent(self) -> None:
        """Records that the next step has been sent."""
        self._full_at.pop(self.step, None)
        self.step += 1
        self.memory.sent()

    def leave(self, sequence: Sequence, *, dropped_by_shards: bool = False) -> None:
        """Removes the sequence, if it is there, and frees its memory. Its tokens of steps in flight will be ignored."""
        if self._remove(sequence):
            self.filter_due |= not dropped_by_shards
            try:
                self.memory.release(sequence)
            except Exception:
                logger.exception("cannot free the blocks of request %d; the block allocator is rebuilt", sequence.id)
                self.memory.rebuild(self)

    def disown(self, sequence: Sequence) -> None:
        """Removes a sequence whose state may be inconsistent, and rebuilds the block allocator without it."""
        self.filter_due |= self._remove(sequence)
        self.memory.rebuild(self)

    def check(self) -> None:
        """Compares the block allocator with what the sequences and the prefix cache hold. Raises AssertionError."""
        self.memory.check(self)

    def _remove(self, sequence: Sequence) -> bool:
        if sequence not in self:
            return False
        del self._members[sequence.id]
        if sequence.adapter is not None:
            self._left_at[sequence.adapter] = self.step - 1
        self._prefilling.pop(sequence.id, None)
        self._jumping.pop(sequence.id, None)
        return True

    def _short_of(self, tokens: int) -> list[Sequence]:
        """Returns the jumping sequences that lack blocks for the next step and `tokens` further tokens.

        Unanswered steps add one token each. Grammars and drafts add more only as far as the blocks of that time reach.
        """
        size = self.memory.block_size
        if not size:
            return []
        unanswered, short = self.step - 1 - self.answered, []
        for sequence in self._jumping.values():
            assert sequence.first_step is not None
            ahead = min(unanswered, self.step - sequence.first_step) + tokens
            if len(sequence.blocks) * size < min(len(sequence.tokens) + ahead, sequence.max_total_tokens - 1):
                short.append(sequence)
        return short

    def _await_full(self, sequence: Sequence) -> None:
        """Records the step at which the sequence's blocks are full, if it can run for so long."""
        size = self.memory.block_size
        step = sequence.full_step(size) if size and not sequence.jumps else None
        if step is not None:
            self._full_at[step].append(sequence)
