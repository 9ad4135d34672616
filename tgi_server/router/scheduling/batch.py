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

# Tokens for which sequences that jump get blocks ahead: as many as drafts, and more than most keys of an object, have.
_AHEAD = MOST_DRAFTED


class WaitingQueue:
    """Sequences by their places: the first one is served first, unless another tenant has had less."""

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
        """Takes a sequence that was preempted, at the place that it had."""
        self.add(sequence)

    def first(self) -> Sequence | None:
        return self._sequences[0] if self._sequences else None

    def leave(self, sequence: Sequence) -> None:
        """Takes the sequence out, if it waits."""
        if self._by_id.pop(sequence.id, None) is not None:
            del self._sequences[bisect_left(self._sequences, sequence.place, key=_place)]


def _place(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.place


class Batch:
    """The sequences that the shards hold, with their memory, and the effect of each step on them.

    Steps are numbered as they are sent; every step advances each sequence past its prompt by one token. So the step at
    which a sequence needs its next block is known in advance, without waiting for its tokens, and no sequence is looked
    at in each step. Sequences with a grammar are the exception: they jump ahead by the tokens that the grammar forces,
    as far as they have blocks, so they are looked at, and given some blocks ahead. So are all where shards speculate.

    id: the batch's, in calls to the shards. step: the number of the next step. answered: of the last one whose tokens
    are known. filter_due: the shards hold sequences that have left.
    """

    def __init__(self, memory: Memory, *, whole_images: bool = False) -> None:
        """whole_images: no step may compute a part of an image."""
        self.memory = memory
        self._whole_images = whole_images
        self.id = 0
        self.reset()

    def reset(self) -> None:
        """Starts another batch, an empty one, once the shards have forgotten this one and all that is cached."""
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
        """Returns the sequences whose known tokens have not all been computed."""
        return list(self._prefilling.values())

    @property
    def replies(self) -> int:
        """The number of sequences past their prompt."""
        return len(self._members) - len(self._prefilling)

    def decoding(self) -> bool:
        """Returns True if the next step may yield tokens of sequences past their prompt: if they have not ended."""
        return any(
            sequence.first_step is not None and sequence.last_step >= self.step for sequence in self._members.values()
        )

    def uses(self, adapter: Adapter) -> bool:
        """Returns True while a sequence, or a step that has been sent, needs the adapter."""
        if self._left_at.get(adapter, 0) > self.answered:
            return True
        self._left_at.pop(adapter, None)
        return any(sequence.adapter is adapter for sequence in self._members.values())

    def admit(self, sequence: Sequence, budget: int) -> Verdict:
        """Lets a sequence join, if it can have the blocks of its known tokens. budget: tokens that it may take."""
        verdict = self.memory.admit(sequence, budget)
        if verdict is Verdict.ADMITTED:
            self._members[sequence.id] = sequence
            self._prefilling[sequence.id] = sequence
        return verdict

    def compute(self, sequence: Sequence, budget: int) -> int:
        """Has the next step compute known tokens of the sequence. Returns how many: `budget`, or what is left.

        Models without KV blocks compute all at once, whatever the budget; some models, all of an image.
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
        """Returns the sequences that need a block more for the next step."""
        size = self.memory.block_size
        filling = (sequence for sequence in self._full_at.get(self.step, ()) if sequence in self)
        # A sequence that was preempted meanwhile is here twice, or too early.
        full = {
            sequence.id: sequence
            for sequence in filling
            if sequence.first_step and sequence.full_step(size) == self.step
        }
        return [*self._short_of(0), *full.values()]

    def closable(self) -> list[Sequence]:
        """Returns the sequences whose grammars may have to end their texts soon."""
        return [sequence for sequence in self._jumping.values() if sequence.closes and not sequence.closing]

    def jumping(self) -> list[Sequence]:
        """Returns the sequences that may soon have a use for a block more."""
        return self._short_of(_AHEAD)

    def grow(self, sequence: Sequence) -> int:
        """Gives the sequence a block more. Returns the block."""
        block = self.memory.grow(sequence)
        self._await_full(sequence)
        return block

    def sent(self) -> None:
        """Notes that the next step has been sent."""
        self._full_at.pop(self.step, None)
        self.step += 1
        self.memory.sent()

    def leave(self, sequence: Sequence, *, dropped_by_shards: bool = False) -> None:
        """Takes the sequence out, if it is there, with what it holds. Tokens that are on their way are ignored."""
        if self._remove(sequence):
            self.filter_due |= not dropped_by_shards
            try:
                self.memory.release(sequence)
            except Exception:
                logger.exception("cannot free the blocks of request %d; the block allocator is rebuilt", sequence.id)
                self.memory.rebuild(self)

    def disown(self, sequence: Sequence) -> None:
        """Takes out a sequence whose blocks and progress are not certain, and drops all of it."""
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
        """Returns the jumping sequences without blocks for the next step and `tokens` tokens more.

        Each step that is not answered yet adds one token for certain. What a grammar or a draft adds besides fits into
        the blocks that the sequence had when the step was planned.
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
        """Notes at which step the sequence's blocks are full, if it runs for so long."""
        size = self.memory.block_size
        step = sequence.full_step(size) if size and not sequence.jumps else None
        if step is not None:
            self._full_at[step].append(sequence)
