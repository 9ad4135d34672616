"""A small model that drafts for a large one with the same tokenizer."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import CacheCapacity
from tgi_server.engine.runners.paged import PagedRunner
from tgi_server.engine.sampling import argmax
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.speculation.draft_cache import DraftCache
from tgi_server.engine.speculation.paged_drafter import CATCH_UP_TOKENS, MissingTokens, PagedDrafter


class DraftModel(PagedDrafter):
    """Proposes what a small model would write.

    It computes a sequence's tokens when a draft for it is worth its time. Then the tokens that the small model finds
    the likeliest are computed one after the other, those of all sequences together.
    """

    def __init__(self, runner: PagedRunner, vocab_size: int, max_positions: int) -> None:
        """vocab_size, max_positions: the tokens that both models know, and the positions that the small one has."""
        super().__init__(runner, behind=0)
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._cache = DraftCache(runner.block_size)

    def warm_up(self, capacity: CacheCapacity, group: ShardGroup | None) -> None:
        super().warm_up(capacity, group)
        self._cache = DraftCache(self._runner.block_size)

    def propose(self, room: Mapping[RunningSequence, int]) -> dict[RunningSequence, list[int]]:
        wanted = {sequence: min(tokens, self._max_positions - sequence.length) for sequence, tokens in room.items()}
        # Those that want more tokens stand before those that want fewer, so that each pass computes the first rows.
        chunks = self._missing(
            sorted((sequence for sequence in wanted if wanted[sequence] > 0), key=lambda sequence: -wanted[sequence])
        )
        if not chunks:
            return {}
        rows = [chunk.sequence for chunk in chunks if chunk.last]
        drafts = dict(zip(rows, self._draft(chunks, rows, [wanted[sequence] for sequence in rows]), strict=True))
        for sequence, draft in drafts.items():
            self._cache.write(sequence, sequence.length, draft[:-1])
        return drafts

    def _missing(self, sequences: Sequence[RunningSequence]) -> list[MissingTokens]:
        """Returns what the small model has to compute next, which counts as computed from here on."""
        chunks: list[MissingTokens] = []
        room = CATCH_UP_TOKENS
        for sequence in sequences:
            start = self._cache.computed(sequence)
            end = min(sequence.length, start + room)
            if end == start:
                break
            tokens = torch.tensor(sequence.tokens(start, end)).clamp_(max=self._vocab_size - 1)
            chunks.append(MissingTokens(sequence, tokens, start, all_logits=False, last=end == sequence.length))
            self._cache.write(sequence, end)
            room -= end - start
        return chunks

    def _argmax(self, logits: Tensor) -> Tensor:
        return argmax(logits[:, : self._vocab_size].contiguous())
