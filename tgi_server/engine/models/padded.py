"""The padded way to run a model: its own attention and cache, with sequences of different lengths side by side."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgi_server.engine.errors import InvalidCall, NotEnoughMemory
from tgi_server.engine.memory import cache_bytes
from tgi_server.engine.models.limits import UNBOUNDED_POSITIONS, position_limit, warm_up_tokens
from tgi_server.engine.models.padded_batch import PaddedBatch
from tgi_server.engine.models.padded_passes import CausalPasses, Seq2SeqPasses
from tgi_server.engine.models.rope import LengthDependentRope
from tgi_server.engine.models.runner import Capacity, PromptChunk, Runner
from tgi_server.engine.parameters import StoppingParameters
from tgi_server.engine.sequence import Sequence

PADDING_LIMIT = 2
"""Prompts are computed side by side as long as that makes at most this many times as many tokens as they have."""


class PaddedRunner(Runner):
    """Prompts are computed whole, apart from the running rows, and then stand below those.

    Rows that move or go are only noted; the batch is rebuilt once, before the next pass. A pass costs as much memory
    and time as if every sequence were as long as the longest one.
    """

    paged = False
    block_size = 1

    def __init__(self, model: PreTrainedModel, memory_fraction: float, cpu_memory: int | None) -> None:
        """Raises UnsupportedModel when the model's answers depend on its neighbours' lengths."""
        self._model = model
        self._device = model.device
        self._memory_fraction = memory_fraction
        self._cpu_memory = cpu_memory
        self._rope = LengthDependentRope(model)
        self._passes = (Seq2SeqPasses if model.config.is_encoder_decoder else CausalPasses)(model)
        self._batch: PaddedBatch | None = None
        self._joining: PaddedBatch | None = None
        self._promoted = 0
        self._rows: list[int] = []  # the row that each row has in self._batch, where it still stands as it was
        self._tokens = torch.zeros(0, dtype=torch.int64, device=self._device)

    def warm_up(self, max_batch_size: int, max_prefill_tokens: int, max_total_tokens: int | None) -> Capacity:
        limit = max_total_tokens or position_limit(self._model.config) or UNBOUNDED_POSITIONS
        self._tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=self._device)
        token_bytes = self._run_largest(max_prefill_tokens)
        affordable = cache_bytes(self._device, self._memory_fraction, self._cpu_memory) // token_bytes
        tokens = min(max_batch_size * limit, affordable)
        needed = max_total_tokens or 1
        if tokens < needed:
            raise NotEnoughMemory(
                f"the memory left holds what the model remembers of {tokens} tokens, but one sequence needs "
                f"{needed}; lower --max-total-tokens, or give the cache more memory"
            )
        total = min(limit, tokens)
        self._rope.fix(total)
        return Capacity(tokens, self.block_size, max_total_tokens=total, max_batch_total_tokens=tokens)

    def forward(self, decoding: int, chunks: list[PromptChunk]) -> Tensor:
        self._rearrange()
        logits = []
        if decoding:
            assert self._batch is not None
            logits.append(self._passes.decode(self._batch, self._tokens[:decoding]))
        if chunks:
            logits += self._prefill(chunks)
        return torch.cat(logits)

    def join(self, sequence: Sequence) -> None:
        if sequence.computed or sequence.copy or sequence.blocks:
            raise InvalidCall(f"request {sequence.request_id}: this model keeps no KV blocks")

    def promote(self, sequence: Sequence, row: int) -> None:
        assert self._joining is not None
        self._promoted += 1
        if self._promoted < len(self._joining):
            return
        if self._batch is None:
            self._batch = self._joining
        else:
            self._batch.append(self._joining)
        self._joining = None
        self._rows = list(range(len(self._batch)))

    def accept(self, first_row: int, token_ids: Tensor) -> None:
        self._tokens[first_row : first_row + len(token_ids)] = token_ids

    def grant(self, sequence: Sequence, row: int | None, blocks: list[int]) -> None:
        raise InvalidCall(f"request {sequence.request_id}: this model keeps no KV blocks")

    def move(self, source: int, target: int) -> None:
        self._rows[target] = self._rows[source]
        self._tokens[target] = self._tokens[source]

    def truncate(self, rows: int) -> None:
        del self._rows[rows:]
        if not rows:
            self._batch = None

    def leave(self, sequence: Sequence) -> None:
        """Nothing to do: nothing is remembered of a prompt that has not been computed."""

    def _rearrange(self) -> None:
        if self._batch is not None and self._rows != list(range(len(self._batch))):
            self._batch.select(self._rows)
            self._rows = list(range(len(self._rows)))

    def _prefill(self, chunks: list[PromptChunk]) -> list[Tensor]:
        """Computes prompts, which become `self._joining`, in their order. Returns each one's logits."""
        for chunk in chunks:
            if chunk.start or not chunk.completes:
                raise InvalidCall(f"request {chunk.sequence.request_id}: this model computes a prompt in one step")
        self._joining, self._promoted = None, 0
        logits: dict[int, Tensor] = {}
        for group in _groups([len(chunk.tokens) for chunk in chunks]):
            members = [chunks[index] for index in group]
            batch, computed = self._passes.prefill(
                [chunk.sequence for chunk in members], any(chunk.all_logits for chunk in members)
            )
            for index, chunk, rows in zip(group, members, computed, strict=True):
                logits[index] = rows[len(rows) - chunk.logits :]
            if self._joining is None:
                self._joining = batch
            else:
                self._joining.append(batch)
        assert self._joining is not None
        order = list(logits)
        if order != sorted(order):
            self._joining.select([order.index(index) for index in range(len(order))])
        return [logits[index] for index in range(len(chunks))]

    def _run_largest(self, max_prefill_tokens: int) -> int:
        """Runs a prompt as long as a step may compute, and a step after it. Returns the bytes that a token takes."""
        tokens = warm_up_tokens(self._model.config, self._device, max_prefill_tokens)
        sequence = Sequence(0, [0] * tokens, StoppingParameters(2))
        self.forward(0, [PromptChunk(sequence, sequence.next_chunk(tokens), start=0, all_logits=False)])
        self.promote(sequence, 0)
        self.forward(1, [])
        assert self._batch is not None
        token_bytes = self._batch.bytes_per_token()
        self.truncate(0)
        return token_bytes


def _groups(lengths: list[int]) -> list[list[int]]:
    """Indices of prompts that are computed side by side, so that long ones do not make short ones costly."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if groups:
            longest, total = lengths[groups[-1][0]], sum(lengths[member] for member in groups[-1])
            if longest * (len(groups[-1]) + 1) <= PADDING_LIMIT * (total + lengths[index]):
                groups[-1].append(index)
                continue
        groups.append([index])
    return groups
