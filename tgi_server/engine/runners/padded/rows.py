"""The rows of sequences in padded batches: all in one batch, or each in a pass of its own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.runners.padded.batch import PaddedBatch
from tgi_server.engine.runners.padded.passes import Passes

# Prompts are computed in one batch if padding makes the tokens at most this many times as many.
PADDING_LIMIT = 2


class Rows(ABC):
    """The sequences past their prompt, in order, and prompts that have just been computed and will join them."""

    def __init__(self, passes: Passes) -> None:
        self._passes = passes

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of rows, without the prompts that have not joined."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> Tensor:
        """Advances every row by its token. tokens: [rows] int64. Returns logits, [rows, vocab_size]."""

    @abstractmethod
    def prefill(self, chunks: Sequence[PromptChunk]) -> list[Tensor]:
        """Computes whole prompts. Returns the logits that each wants, [wanted, vocab_size]."""

    @abstractmethod
    def commit(self) -> None:
        """Makes the prompts computed last the last rows, in their order."""

    @abstractmethod
    def select(self, rows: list[int]) -> None:
        """Moves row rows[i] to row i, for all i, and forgets the other rows."""

    @abstractmethod
    def row_bytes(self) -> tuple[int, int]:
        """Returns the bytes that a row takes for each token, and the bytes that do not depend on its length."""

    def _compute(self, chunks: Sequence[PromptChunk], *, joinable: bool) -> tuple[PaddedBatch, list[Tensor]]:
        sequences = [chunk.sequence for chunk in chunks]
        all_logits = any(chunk.all_logits for chunk in chunks)
        batch, logits = self._passes.prefill(sequences, all_logits=all_logits, joinable=joinable)
        return batch, [rows[len(rows) - chunk.logits :] for chunk, rows in zip(chunks, logits, strict=True)]


class SideBySide(Rows):
    """One batch, as long as its longest row."""

    _batch: PaddedBatch | None = None
    _joining: PaddedBatch | None = None

    def __len__(self) -> int:
        return len(self._batch) if self._batch else 0

    def decode(self, tokens: Tensor) -> Tensor:
        assert self._batch is not None
        return self._passes.decode(self._batch, tokens)

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[Tensor]:
        self._joining = None
        logits: dict[int, Tensor] = {}
        for group in _groups([len(chunk.tokens) for chunk in chunks]):
            batch, computed = self._compute([chunks[index] for index in group], joinable=True)
            logits.update(zip(group, computed, strict=True))
            self._joining = _joined(self._joining, batch)
        assert self._joining is not None
        order = list(logits)
        if order != sorted(order):
            self._joining.select([order.index(index) for index in range(len(order))])
        return [logits[index] for index in range(len(chunks))]

    def commit(self) -> None:
        assert self._joining is not None
        self._batch, self._joining = _joined(self._batch, self._joining), None

    def select(self, rows: list[int]) -> None:
        if not rows:
            self._batch = None
        elif self._batch is not None and rows != list(range(len(self._batch))):
            self._batch.select(rows)

    def row_bytes(self) -> tuple[int, int]:
        assert self._batch is not None
        return self._batch.row_bytes()


class OneByOne(Rows):
    """Runs each row in a pass of its own, for models whose results depend on the padding of a sequence."""

    def __init__(self, passes: Passes) -> None:
        super().__init__(passes)
        self._batches: list[PaddedBatch] = []
        self._joining: list[PaddedBatch] = []

    def __len__(self) -> int:
        return len(self._batches)

    def decode(self, tokens: Tensor) -> Tensor:
        rows = zip(self._batches, tokens.split(1), strict=True)
        return torch.cat([self._passes.decode(batch, token) for batch, token in rows])

    def prefill(self, chunks: Sequence[PromptChunk]) -> list[Tensor]:
        computed = [self._compute([chunk], joinable=False) for chunk in chunks]
        self._joining = [batch for batch, _ in computed]
        return [logits for _, (logits,) in computed]

    def commit(self) -> None:
        self._batches += self._joining
        self._joining = []

    def select(self, rows: list[int]) -> None:
        self._batches = [self._batches[row] for row in rows]

    def row_bytes(self) -> tuple[int, int]:
        return self._batches[0].row_bytes()


def _joined(batch: PaddedBatch | None, other: PaddedBatch) -> PaddedBatch:
    if batch is None:
        return other
    batch.append(other)
    return batch


def _groups(lengths: list[int]) -> list[list[int]]:
    """Groups prompts of similar length, so that short ones get little padding. Returns indices."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if groups:
            longest, total = lengths[groups[-1][0]], sum(lengths[member] for member in groups[-1])
            if longest * (len(groups[-1]) + 1) <= PADDING_LIMIT * (total + lengths[index]):
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups
