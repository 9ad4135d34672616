"""The contents of a drafting model's KV cache, in blocks that are those of the large model.

The two caches have blocks of the same numbers, so a sequence's block table is that of both. But the small model does
not compute every token that the large one does: it drafts where that is worth it. Which of a sequence's tokens it still
has to compute follows from the contents of the blocks: the router's prefix cache, preemption and block allocation
need not know of it. Wrong contents would make wrong drafts, never a wrong text.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

from tgi_server.engine.sequence import RunningSequence


@dataclass(slots=True)
class _Progress:
    """The progress of a sequence.

    tokens: the number of computed tokens, from the beginning. before: identifies all tokens before the block of the
    next token. drafted: tokens that were computed after these, as a draft.
    """

    tokens: int
    before: int
    drafted: list[int]


class DraftCache:
    """The tokens whose keys and values each block holds."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._blocks: dict[int, tuple[int, list[int]]] = {}  # by block: an id of the tokens before it, its tokens
        self._progress: WeakKeyDictionary[RunningSequence, _Progress] = WeakKeyDictionary()

    def computed(self, sequence: RunningSequence) -> int:
        """Returns how many of a sequence's first tokens need not be computed; the last one always has to be."""
        progress = self._progress.get(sequence)
        if progress is None:
            progress = self._progress[sequence] = self._found(sequence)
        if progress.drafted:
            start, drafted = progress.tokens, progress.drafted
            chosen = sequence.tokens(start, min(sequence.length - 1, start + len(drafted)))
            self.write(sequence, start + _common(chosen, drafted))
        return min(progress.tokens, sequence.length - 1)

    def write(self, sequence: RunningSequence, end: int, drafted: list[int] | None = None) -> None:
        """Notes that the sequence's tokens before `end` are computed, and `drafted` tokens after them."""
        progress = self._progress[sequence]
        place = progress.tokens // self._size
        while progress.tokens < end:
            start = place * self._size
            progress.tokens = min(end, start + self._size)
            tokens = sequence.tokens(start, progress.tokens)
            self._blocks[sequence.blocks[place]] = progress.before, tokens
            if len(tokens) == self._size:
                progress.before = _key(progress.before, tokens)
            place += 1
        progress.drafted = drafted or []
        last = end + len(progress.drafted)
        for block in sequence.blocks[-(-end // self._size) : -(-last // self._size)]:
            self._blocks.pop(block, None)  # what it held of another sequence is overwritten

    def _found(self, sequence: RunningSequence) -> _Progress:
        """Returns the progress of a new sequence, which earlier sequences with the same beginning have made."""
        progress = _Progress(0, 0, [])
        for block in sequence.blocks:
            before, held = self._blocks.get(block, (0, []))
            tokens = sequence.tokens(progress.tokens, min(sequence.length - 1, progress.tokens + self._size))
            common = _common(tokens, held) if before == progress.before else 0
            progress.tokens += common
            if common < self._size:
                break
            progress.before = _key(before, tokens)
        return progress


def _common(first: list[int], second: list[int]) -> int:
    """Returns the number of tokens with which both lists begin."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def _key(before: int, tokens: list[int]) -> int:
    return hash((before, *tokens))
