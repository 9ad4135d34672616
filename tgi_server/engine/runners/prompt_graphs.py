"""Steps with prompts, captured as CUDA graphs for several numbers of tokens.

A step of any kind (decoding sequences, chunks of prompts, drafts) is copied to the inputs of the next larger graph. The
padding after its last token is a sequence of its own in the scratch block, and its results are dropped.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.base import ChunkSpan, ForwardMetadata
from tgi_server.engine.backends.base import PassInput
from tgi_server.engine.runners.graphs import Capture, SharedOutputs

# Padding is at most a third of a step of more than 16 tokens. Beyond the last count a graph saves no time: the device
# takes longer to compute the kernels than the host to launch them.
TOKEN_COUNTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024)


def graph_token_counts(most: int) -> list[int]:
    """Returns the token counts to capture, smallest first, where steps have at most `most` tokens."""
    return sorted({*(count for count in TOKEN_COUNTS if count < most), min(most, TOKEN_COUNTS[-1])})


class PromptGraphs:
    """Captured steps with prompts. What `run` returns is overwritten by the next run."""

    def __init__(
        self,
        counts: Sequence[int],
        rows: int,
        tables: Tensor,
        block_size: int,
        run: Callable[[PassInput], Tensor],
        capture: Capture,
    ) -> None:
        """Raises RuntimeError if the steps cannot be captured.

        counts: tokens of each step, ascending. rows: maximum number of sequences of a step, and of wanted logits.
        tables: the block tables of a step, [any, blocks] int32. run: computes the wanted logits, [wanted, vocab_size].
        """
        most, device = counts[-1], tables.device
        blocks = max(tables.shape[1], -(-most // block_size))  # the padding may be longer than any sequence
        self._rows = rows
        self._longest = blocks * block_size
        self._tokens, self._positions, self._slots, self._wanted = (
            torch.zeros(size, dtype=torch.int64, device=device) for size in (most, most, most, rows)
        )
        self._tables = tables.new_zeros(rows + 1, blocks)
        self._kv_lengths = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._starts = torch.zeros(rows + 2, dtype=torch.int32, device=device)
        outputs = SharedOutputs()
        self._steps: dict[int, Callable[[], tuple[Tensor, ...]]] = {}
        for count in sorted(counts, reverse=True):
            self._pad(0, 0, count)
            self._steps[count] = capture(lambda count=count: outputs.put(run(self._input(count))))  # type: ignore[misc]

    def run(self, inputs: PassInput) -> Tensor | None:
        """Returns the wanted logits of a step; None if no captured step is large enough, or if a row has an adapter or
        images.
        """
        assert inputs.wanted is not None
        tokens, wanted = len(inputs.tokens), len(inputs.wanted)
        sequences = len(inputs.metadata.kv_lengths)
        counts = [count for count in self._steps if count >= tokens and self._room(count) >= wanted]
        further = (inputs.adapters, inputs.images, inputs.rotary, inputs.metadata.ends)
        if not counts or sequences > self._rows or any(value is not None for value in further):
            return None
        self._copy(inputs)
        self._pad(tokens, sequences, min(counts))
        return self._steps[min(counts)]()[0][:wanted]

    def _room(self, count: int) -> int:
        """Returns the maximum number of logits of a step with this many tokens."""
        return min(count, self._rows)

    def _copy(self, inputs: PassInput) -> None:
        metadata, tokens = inputs.metadata, len(inputs.tokens)
        sequences, blocks = metadata.block_tables.shape
        assert inputs.wanted is not None
        self._tokens[:tokens] = inputs.tokens
        self._positions[:tokens] = inputs.positions
        self._slots[:tokens] = metadata.slots
        self._tables[:sequences, :blocks] = metadata.block_tables
        self._kv_lengths[:sequences] = metadata.kv_lengths
        self._starts[: sequences + 1] = metadata.query_starts
        self._wanted[: len(inputs.wanted)] = inputs.wanted
        self._wanted[len(inputs.wanted) :].zero_()

    def _pad(self, tokens: int, sequences: int, count: int) -> None:
        """Adds a sequence in the scratch block, so that a step of these tokens and sequences has `count` tokens."""
        self._slots[tokens:].zero_()
        self._tables[sequences].zero_()
        self._kv_lengths[sequences].fill_(count - tokens)
        self._starts[sequences + 1 :].fill_(count)

    def _input(self, count: int) -> PassInput:
        metadata = ForwardMetadata(
            slots=self._slots[:count],
            block_tables=self._tables,
            kv_lengths=self._kv_lengths,
            query_starts=self._starts,
            decoding=self._rows,  # at most
            chunks=[ChunkSpan(0, count, self._longest)],  # there are prompts; where, only the tensors know
            max_kv_length=self._longest,
        )
        return PassInput(self._tokens[:count], self._positions[:count], metadata, self._wanted[: self._room(count)])
