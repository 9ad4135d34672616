"""The common part of drafters with keys and values of their own: passes in which drafted tokens follow each other."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tgi_server.engine.backends.base import TopOnly
from tgi_server.engine.parallel import ShardGroup
from tgi_server.engine.runners.base import CacheCapacity, PromptChunk
from tgi_server.engine.runners.paged import PagedRunner
from tgi_server.engine.sampling import argmax
from tgi_server.engine.sequence import RunningSequence
from tgi_server.engine.speculation.costs import StepCosts, measure_costs
from tgi_server.engine.speculation.drafters import ModelDrafter

logger = logging.getLogger(__name__)

# Tokens that a drafter computes at once to catch up with the model. A sequence with more of them is drafted for some
# steps later, and its neighbours need not wait.
CATCH_UP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class MissingTokens(PromptChunk):
    """Tokens of a sequence that the drafter has not computed. last: the sequence gets a draft after them."""

    last: bool

    @property
    def completes(self) -> bool:
        return self.last


class PagedDrafter(ModelDrafter):
    """A drafter with its own runner, which uses the same block ids as the model."""

    def __init__(self, runner: PagedRunner, behind: int) -> None:
        """behind: number of positions from a sequence's last computed token to the sequence's length."""
        self._runner = runner
        self._behind = behind
        self._costs: StepCosts | None = None

    def warm_up(self, capacity: CacheCapacity, group: ShardGroup | None) -> None:
        self._runner.follow(capacity, CATCH_UP_TOKENS)
        self._costs = measure_costs(self._runner, capacity, group)
        logger.info("steps of what drafts take: %s", self._costs)

    def seconds(self, tokens: int, sequences: int) -> float:
        """The first token takes a pass over those that came since the last draft, mostly two of each sequence."""
        if self._costs is None:
            return 0.0
        return self._costs.with_drafts(2 * sequences) + (tokens - 1) * self._costs.without_drafts(sequences)

    def _draft(
        self, chunks: Sequence[MissingTokens], rows: Sequence[RunningSequence], lengths: Sequence[int]
    ) -> list[list[int]]:
        """Computes chunks, and returns drafts of the given lengths, the longest first.

        rows: the sequences whose chunk is their last one, in the order of the chunks.
        """
        self._runner.truncate(0)
        logits = self._runner.forward(0, list(chunks), TopOnly(1, None))
        if not rows:
            return []
        drafted = [self._argmax(logits)]
        for row, sequence in enumerate(rows):
            self._runner.place(sequence, row, sequence.length - self._behind)
        for place in range(1, lengths[0]):
            going = sum(length > place for length in lengths)
            self._runner.truncate(going)  # drops rows whose drafts are complete; a captured pass would continue them
            self._runner.accept(0, drafted[-1][:going])
            drafted.append(self._argmax(self._runner.forward(going, [], TopOnly(1, None))))
        tokens = [ids.tolist() for ids in drafted]
        return [[tokens[place][row] for place in range(length)] for row, length in enumerate(lengths)]

    def _argmax(self, logits: Tensor) -> Tensor:
        """Returns the argmax, [rows] int64, of logits, [rows, the drafter's vocabulary]."""
        return argmax(logits)
