"""The interface of the two ways to run a model: paged and padded."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor, nn
from transformers import PretrainedConfig

from tgi_server.contract import StateSave, StoppingParameters
from tgi_server.engine.backends.base import Backend, MakeLora, TopOnly
from tgi_server.engine.backends.lora import AdaptedLinear
from tgi_server.engine.backends.states import SequenceStates
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.models.families import position_limit
from tgi_server.engine.sequence import RunningSequence

UNBOUNDED_POSITIONS = 1 << 20
CPU_WARM_UP_TOKENS = 32

# Takes logits, [rows, vocab_size], and samples from them with the options that need the most memory.
Sample = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """The capacity of the KV cache, and limits of batches and steps.

    max_batch_size: maximum number of sequences in a batch. num_blocks: KV blocks that can be granted, with ids 1 ..
    num_blocks. max_total_tokens: maximum number of tokens of one sequence. max_batch_total_tokens: maximum number of
    tokens of all sequences. num_snapshots: number of state snapshots, with ids 1 .. num_snapshots; 0 if sequences have
    no states. max_prefill_tokens: maximum number of prompt tokens in a step.
    """

    max_batch_size: int
    num_blocks: int
    block_size: int
    max_total_tokens: int
    max_batch_total_tokens: int
    num_snapshots: int = 0
    max_prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Known tokens of one sequence that a pass computes.

    tokens: [length] int64, on the host. start: position of the first one.
    all_logits: True if the logits of every token are needed, False for those of the sequence's last known token only.
    saves: pairs of a number of tokens and the snapshot into which the states after them are copied; ascending.
    """

    sequence: RunningSequence
    tokens: Tensor
    start: int
    all_logits: bool
    saves: tuple[tuple[int, int], ...] = field(default=(), kw_only=True)

    @classmethod
    def next_of(
        cls, sequence: RunningSequence, tokens: int, *, all_logits: bool = False, saves: Sequence[StateSave] = ()
    ) -> Self:
        """Takes the next `tokens` known tokens of a sequence; they count as computed from here on."""
        start = sequence.computed
        known = sequence.next_chunk(tokens)
        inside = sorted((save.length - start, save.snapshot) for save in saves if start < save.length <= start + tokens)
        return cls(sequence, known, start, all_logits, saves=tuple(inside))

    @property
    def drafted(self) -> bool:
        """Returns True if these tokens are not known: they may be wrong."""
        return self.start >= len(self.sequence.known)

    @property
    def completes(self) -> bool:
        return self.start + len(self.tokens) == len(self.sequence.known)

    @property
    def logits(self) -> int:
        """The number of rows of logits that this chunk yields."""
        return len(self.tokens) if self.all_logits else int(self.completes)


class Runner(ABC):
    """Runs the model for one batch. Sequences past their prompt are in the dense rows 0 .. n - 1.

    paged: True if keys and values are in blocks that the caller grants, and prompts can be computed in chunks.
    states: recurrent states of the sequences; None: there are none. block_size: tokens of a KV block.
    fallbacks: reasons for parts that run on slower code than the device allows. backend: the backend of the model.
    argmax_ids: [rows] int64, the argmax of each row of the last pass, if the pass has computed it; these tokens are the
    next inputs of the rows, unless `accept` is given others.
    """

    paged: bool
    block_size: int
    states: SequenceStates | None = None
    argmax_ids: Tensor | None = None

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.fallbacks = backend.fallbacks  # one list for the model and for layers that draft for it

    @abstractmethod
    def warm_up(
        self,
        max_batch_size: int | None,
        max_prefill_tokens: int | None,
        max_total_tokens: int | None,
        max_batch_total_tokens: int | None,
        adapter_bytes: int = 0,
        sample: Sample | None = None,
    ) -> CacheCapacity:
        """Sizes the cache and runs the largest pass. Raises NotEnoughMemory.

        sample: samples from the logits of the largest batch, on devices whose memory has to last for that, too.
        """

    @abstractmethod
    def forward(self, decoding: int, chunks: list[PromptChunk], top: TopOnly | None = None) -> Tensor:
        """Runs one pass: rows 0 .. decoding - 1 advance by a token, and the chunks are computed.

        Returns logits, [rows, vocab_size] in the model's dtype: those of the decoding rows, then each chunk's.
        top: None: every logit is needed.
        """

    @property
    def captured_drafts(self) -> list[tuple[int, int]]:
        """Returns rows and tokens of the passes with drafted tokens that were captured."""
        return []

    def forward_drafts(self, decoding: int, drafts: Sequence[tuple[int, Tensor]]) -> Tensor | None:
        """Runs one captured pass like `forward`, with drafted tokens instead of chunks. drafts: pairs (row, tokens).

        Returns None if no captured pass fits.
        """
        return None

    @abstractmethod
    def adapt(self, lora: MakeLora) -> list[AdaptedLinear]:
        """Returns the linear layers that adapters may change. Later passes apply the LoRA deltas put there."""

    @abstractmethod
    def join(self, sequence: RunningSequence) -> None:
        """Prepares a sequence whose prompt has not been computed."""

    def leave(self, sequence: RunningSequence) -> None:  # noqa: B027
        """Frees everything of a sequence but its row and its blocks, such as a slot for states."""

    def save_state(self, sequence: RunningSequence, snapshot: int) -> None:
        """Copies the state of a sequence, as earlier passes left it, into a snapshot. Only for models with states."""
        raise InvalidCall("the model has no states beside keys and values")

    @abstractmethod
    def promote(self, sequence: RunningSequence, row: int) -> None:
        """Gives a row to a sequence whose known tokens are all computed."""

    @abstractmethod
    def accept(self, first_row: int, token_ids: Tensor) -> None:
        """Sets the next inputs of the rows from `first_row` on. token_ids: [rows] int64 on the device."""

    def skip(self, row: int, tokens: int, token_id: int) -> None:
        """Advances a row by `tokens` tokens more than the one of the last pass. token_id: its next input.

        The pass has computed them as a chunk after the row's own token. Only for paged models.
        """
        raise InvalidCall("a padded row advances by one token a pass")

    @abstractmethod
    def grant(self, sequence: RunningSequence, row: int | None, blocks: list[int]) -> None:
        """Appends blocks to a sequence's block table."""

    @abstractmethod
    def move(self, source: int, target: int) -> None:
        """Moves the sequence in row `source` to row `target`, whose sequence is forgotten."""

    @abstractmethod
    def truncate(self, rows: int) -> None:
        """Forgets the rows from `rows` on."""

    def run_prompt(self, tokens: int, blocks: list[int]) -> None:
        """Computes a prompt of `tokens` tokens, and the decode step after it, as the warm-up does. Its row stays."""
        sequence = RunningSequence(0, [0] * tokens, StoppingParameters(2), blocks=blocks)
        self.forward(0, [PromptChunk.next_of(sequence, tokens)])
        self.promote(sequence, 0)
        self.forward(1, [])


def within_positions(model: nn.Module, config: PretrainedConfig, max_total_tokens: int | None) -> int | None:
    """Returns `max_total_tokens`, but at most the number of positions of a model with learned positions.

    Rotary positions can exceed the length that a model was trained for; a table of learned ones cannot.
    """
    positions = position_limit(config)
    if max_total_tokens is None or positions is None or any(hasattr(module, "rope_type") for module in model.modules()):
        return max_total_tokens
    return min(max_total_tokens, positions)


def warm_up_tokens(config: PretrainedConfig, max_prefill_tokens: int, *, fixed_memory: bool) -> int:
    """Returns the tokens of the prompt that the warm-up runs: the longest one, so that memory free after it stays free.

    Where memory is not fixed, as on a CPU, the prompt is short: it only does the work of first uses. There is always
    room for one more token after it.
    """
    tokens = max_prefill_tokens if fixed_memory else min(max_prefill_tokens, CPU_WARM_UP_TOKENS)
    limit = position_limit(config)
    return min(tokens, limit - 1) if limit else tokens
