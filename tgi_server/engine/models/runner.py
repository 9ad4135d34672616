"""What the engine needs of a way to run a model: the paged one and the padded one."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from tgi_server.engine.grammar.masks import PendingMask
from tgi_server.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits beside the weights.

    num_blocks: KV blocks that may be granted, with ids 1 .. num_blocks. max_total_tokens: of one sequence.
    max_batch_total_tokens: of all sequences together.
    """

    num_blocks: int
    block_size: int
    max_total_tokens: int
    max_batch_total_tokens: int


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Known tokens of one sequence that a pass computes.

    tokens: [length] int64, on the host. start: position of the first one.
    all_logits: whether the logits of every token are wanted; else only those of the sequence's last known token.
    """

    sequence: Sequence
    tokens: Tensor
    start: int
    all_logits: bool

    @property
    def completes(self) -> bool:
        return self.start + len(self.tokens) == len(self.sequence.known)

    @property
    def logits(self) -> int:
        """How many rows of logits this chunk yields."""
        return len(self.tokens) if self.all_logits else int(self.completes)


@dataclass(frozen=True, slots=True)
class Likeliest:
    """That no more than the largest logit of each row is wanted.

    mask: of the rows of which it is the largest of what the mask allows.
    """

    mask: PendingMask | None


class Runner(ABC):
    """Runs the model for one batch. Sequences past their prompt stand in dense rows 0 .. n - 1.

    paged: whether prompts may be computed in chunks, and keys and values live in blocks that the caller grants.
    block_size: tokens of a KV block.
    """

    paged: bool
    block_size: int

    @abstractmethod
    def warm_up(self, max_batch_size: int, max_prefill_tokens: int, max_total_tokens: int | None) -> Capacity:
        """Sizes the cache and runs the largest pass. Raises NotEnoughMemory."""

    def reserve(self, seconds: float) -> bool:
        """Spends about so much time, now that there is some, on memory for what may come. Whether more is left to do.

        Always stays ahead of what has been used by the same amount.
        """
        return False

    @abstractmethod
    def forward(self, decoding: int, chunks: list[PromptChunk], likeliest: Likeliest | None = None) -> Tensor:
        """One pass: rows 0 .. decoding - 1 advance by a token, and the chunks are computed.

        Returns logits, [rows, vocab_size] in the model's dtype: those of the decoding rows, then each chunk's.
        likeliest: logits that it does not ask for may be minus infinity.
        """

    @abstractmethod
    def join(self, sequence: Sequence) -> None:
        """A sequence, not yet computed, will have chunks from now on."""

    @abstractmethod
    def promote(self, sequence: Sequence, row: int) -> None:
        """A sequence whose known tokens are all computed takes a row."""

    @abstractmethod
    def accept(self, first_row: int, token_ids: Tensor) -> None:
        """token_ids, [rows] int64 on the device, are the next inputs of the rows from `first_row` on."""

    @abstractmethod
    def grant(self, sequence: Sequence, row: int | None, blocks: list[int]) -> None:
        """Appends blocks to a sequence's block table."""

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """The sequence in row `source` stands in row `target` from now on; what was there is forgotten."""

    @abstractmethod
    def truncate(self, rows: int) -> None:
        """Rows from `rows` on are forgotten."""

    @abstractmethod
    def leave(self, sequence: Sequence) -> None:
        """A sequence without a row is forgotten."""
