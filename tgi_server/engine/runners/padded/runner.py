"""Runs a model in padded batches: with its own attention and cache, on sequences of different lengths."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgi_server.engine.backends.base import Backend, MakeLora, TopOnly
from tgi_server.engine.backends.devices import cache_bytes, forget_peak
from tgi_server.engine.backends.generic import CurrentRows, adapt_modules
from tgi_server.engine.backends.lora import AdaptedLinear
from tgi_server.engine.backends.rope import LengthDependentRope
from tgi_server.engine.errors import InvalidCall, NotEnoughMemory
from tgi_server.engine.models.families import position_limit
from tgi_server.engine.runners.base import (
    UNBOUNDED_POSITIONS,
    CacheCapacity,
    PromptChunk,
    Runner,
    Sample,
    warm_up_tokens,
    within_positions,
)
from tgi_server.engine.runners.caps import DEFAULT_PREFILL_TOKENS, DEFAULT_SEQUENCES
from tgi_server.engine.runners.padded.passes import CausalPasses, Seq2SeqPasses
from tgi_server.engine.runners.padded.probe import choose_rows
from tgi_server.engine.sequence import RunningSequence


class PaddedRunner(Runner):
    """Runs padded batches. Prompts are computed whole, in passes of their own, and become rows after the running ones.

    A pass costs as much memory and time as if every sequence were as long as the longest one. Moved and removed rows
    are only noted; the model's cache is rearranged once, before the next pass.
    """

    paged = False
    block_size = 1

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        """backend: the backend that computes the model.

        Raises UnsupportedModel for a model whose results are wrong when it continues from its cache.
        """
        super().__init__(backend)
        self._model = model
        self._device = model.device
        self._group = group = backend.group
        self._current = CurrentRows()
        self._rope = LengthDependentRope(model)
        passes = (Seq2SeqPasses if model.config.is_encoder_decoder else CausalPasses)(model, self._current)
        self._rows = choose_rows(model, passes, group)
        self._order: list[int] = []  # for each row, which of self._rows it is
        self._promoted = 0  # of the prompts computed last
        self._joining = 0  # how many those are

    def warm_up(
        self,
        max_batch_size: int | None,
        max_prefill_tokens: int | None,
        max_total_tokens: int | None,
        max_batch_total_tokens: int | None,
        adapter_bytes: int = 0,
        sample: Sample | None = None,
    ) -> CacheCapacity:
        max_batch_size = max_batch_size or DEFAULT_SEQUENCES
        max_prefill_tokens = max_prefill_tokens or DEFAULT_PREFILL_TOKENS
        max_total_tokens = within_positions(self._model, self._model.config, max_total_tokens)
        limit = max_total_tokens or position_limit(self._model.config) or UNBOUNDED_POSITIONS
        self._tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=self._device)
        forget_peak(self._device)
        token_bytes, fixed_bytes = self._run_largest(max_prefill_tokens)
        if sample is not None:
            vocab_size = self._model.config.get_text_config(decoder=True).vocab_size
            sample(torch.zeros(max_batch_size, vocab_size, dtype=self._model.dtype, device=self._device))
        processes = self._group.local_world_size if self._group else 1
        config = self.backend.config
        free = cache_bytes(self._device, config.memory_fraction, config.cpu_memory, processes, adapter_bytes)
        tokens = min(max_batch_size * limit, (free - max_batch_size * fixed_bytes) // token_bytes)
        if max_batch_total_tokens is not None:
            tokens = min(tokens, max_batch_total_tokens)
        if self._group:
            tokens = self._group.minimum(tokens)
        needed = max_total_tokens or 1
        if tokens < needed:
            raise NotEnoughMemory(
                f"the memory left holds what the model remembers of {max(0, tokens)} tokens, but one sequence needs "
                f"{needed}; lower --max-total-tokens, or give the cache more memory"
            )
        total = min(limit, tokens)
        self._rope.fix(total)
        return CacheCapacity(
            max_batch_size,
            tokens,
            self.block_size,
            max_total_tokens=total,
            max_batch_total_tokens=tokens,
            max_prefill_tokens=max_prefill_tokens,
        )

    def adapt(self, lora: MakeLora) -> list[AdaptedLinear]:
        return adapt_modules(self._model, self._current, lora)

    def forward(self, decoding: int, chunks: list[PromptChunk], top: TopOnly | None = None) -> Tensor:
        self._rows.select(self._order)
        self._order = list(range(len(self._order)))
        logits = [self._rows.decode(self._tokens[:decoding])] if decoding else []
        if chunks:
            for chunk in chunks:
                if chunk.start or not chunk.completes:
                    raise InvalidCall(
                        f"request {chunk.sequence.request_id}: this model computes a whole prompt in one step"
                    )
            logits += self._rows.prefill(chunks)
            self._joining, self._promoted = len(chunks), 0
        return torch.cat(logits)

    def join(self, sequence: RunningSequence) -> None:
        if sequence.computed or sequence.copy or sequence.blocks:
            raise InvalidCall(f"request {sequence.request_id}: this model keeps no KV blocks")

    def promote(self, sequence: RunningSequence, row: int) -> None:
        self._promoted += 1
        if self._promoted == self._joining:
            self._rows.commit()
            self._order = list(range(row + 1))

    def accept(self, first_row: int, token_ids: Tensor) -> None:
        self._tokens[first_row : first_row + len(token_ids)] = token_ids

    def grant(self, sequence: RunningSequence, row: int | None, blocks: list[int]) -> None:
        raise InvalidCall(f"request {sequence.request_id}: this model keeps no KV blocks")

    def move(self, source: int, target: int) -> None:
        self._order[target] = self._order[source]
        self._tokens[target] = self._tokens[source]

    def truncate(self, rows: int) -> None:
        del self._order[rows:]
        if not rows:
            self._rows.select([])

    def _run_largest(self, max_prefill_tokens: int) -> tuple[int, int]:
        """Runs a prompt as long as a step may compute, and a step after it. Returns the bytes that its row takes."""
        tokens = warm_up_tokens(self._model.config, max_prefill_tokens, fixed_memory=self.backend.fixed_memory)
        self.run_prompt(tokens, blocks=[])
        row_bytes = self._rows.row_bytes()
        self.truncate(0)
        return row_bytes
