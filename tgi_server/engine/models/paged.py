"""The paged way to run a model: packed batches, keys and values in blocks, nothing rebuilt per token."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgi_server.engine.attention.base import AttentionBackend, Chunk, Step
from tgi_server.engine.errors import InvalidCall, NotEnoughMemory
from tgi_server.engine.memory import cache_bytes
from tgi_server.engine.models.limits import UNBOUNDED_POSITIONS, position_limit, warm_up_tokens
from tgi_server.engine.models.paged_cache import PagedCache
from tgi_server.engine.models.rope import LengthDependentRope
from tgi_server.engine.models.runner import Capacity, PromptChunk, Runner
from tgi_server.engine.parameters import StoppingParameters
from tgi_server.engine.sequence import Sequence
from tgi_server.engine.sharding import ShardGroup


class PagedRunner(Runner):
    """Batch state lives in preallocated tensors on the device:

    tokens: [rows] int64; the next input of each row. positions: [rows] int64; where it stands in its sequence.
    block_tables: [rows, blocks] int32; entries past a row's last block are 0, the scratch block.

    A row advances by one position a pass, so the host knows every position without asking the device: it is the
    number of passes so far plus the row's `birth`.
    """

    paged = True

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        memory_fraction: float,
        cpu_memory: int | None,
        group: ShardGroup | None = None,
    ) -> None:
        """group: the shards of the model, when this is one of them."""
        self._model = model
        self._backend = backend
        self._device = backend.device
        self.block_size = backend.block_size
        self._memory_fraction = memory_fraction
        self._cpu_memory = cpu_memory
        self._group = group
        self._rope = LengthDependentRope(model)
        self._cache = PagedCache(backend)
        self._cache.attach(model)

    def warm_up(self, max_batch_size: int, max_prefill_tokens: int, max_total_tokens: int | None) -> Capacity:
        size = self._backend.block_size
        limit = max_total_tokens or position_limit(self._model.config) or UNBOUNDED_POSITIONS
        self._run_largest(max_batch_size, max_prefill_tokens)
        token_bytes = self._backend.shape.bytes_per_token(self._backend.dtype)
        processes = self._group.local_world_size if self._group else 1
        free = cache_bytes(self._device, self._memory_fraction, self._cpu_memory, processes)
        affordable = free // (size * token_bytes)
        if self._group:
            affordable = self._group.minimum(affordable)
        useful = max_batch_size * -(-limit // size)
        num_blocks = min(useful, affordable - 1)
        needed = max_total_tokens or size
        if num_blocks * size < needed:
            raise NotEnoughMemory(
                f"the memory left holds the keys and values of {max(0, num_blocks) * size} tokens, but one sequence "
                f"needs {needed}; lower --max-total-tokens, or give the cache more memory"
            )
        total = min(limit, num_blocks * size)
        self._allocate(max_batch_size, num_blocks, total)
        self._rope.fix(total)
        return Capacity(num_blocks, size, max_total_tokens=total, max_batch_total_tokens=num_blocks * size)

    def forward(self, decoding: int, chunks: list[PromptChunk]) -> Tensor:
        logits = self._mixed(decoding, chunks) if chunks else self._decode(decoding)
        self._positions[:decoding] += 1
        self._passes += 1
        return logits

    def _mixed(self, decoding: int, chunks: list[PromptChunk]) -> Tensor:
        tokens = torch.cat([self._tokens[:decoding], *(chunk.tokens.to(self._device) for chunk in chunks)])
        positions = torch.cat(
            [
                self._positions[:decoding],
                *(torch.arange(c.start, c.start + len(c.tokens), device=self._device) for c in chunks),
            ]
        )
        step, wanted = self._mixed_step(decoding, chunks)
        return self._run(tokens, positions, step, wanted)

    def join(self, sequence: Sequence) -> None:
        self._check(sequence, sequence.blocks)
        if sequence.copy:
            self._backend.copy(sequence.copy.source, sequence.copy.target, sequence.copy.tokens)

    def promote(self, sequence: Sequence, row: int) -> None:
        self._positions[row] = len(sequence.known)
        self._births[row] = len(sequence.known) - self._passes
        self._block_tables[row] = 0
        self._block_tables[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks, dtype=torch.int32)

    def accept(self, first_row: int, token_ids: Tensor) -> None:
        self._tokens[first_row : first_row + len(token_ids)] = token_ids

    def grant(self, sequence: Sequence, row: int | None, blocks: list[int]) -> None:
        self._check(sequence, blocks)
        first = len(sequence.blocks)
        sequence.blocks.extend(blocks)
        if row is not None:
            self._block_tables[row, first : first + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)

    def move(self, source: int, target: int) -> None:
        self._tokens[target] = self._tokens[source]
        self._positions[target] = self._positions[source]
        self._births[target] = self._births[source]
        self._block_tables[target] = self._block_tables[source]

    def truncate(self, rows: int) -> None:
        """Nothing to do: rows past the running ones are never read."""

    def leave(self, sequence: Sequence) -> None:
        """Nothing to do: a sequence without a row lives in its own object only."""

    def _check(self, sequence: Sequence, blocks: list[int]) -> None:
        """Raises InvalidCall for blocks that were never handed out: kernels write wherever they are told to."""
        if blocks and not 0 < min(blocks) <= max(blocks) <= self._num_blocks:
            raise InvalidCall(f"request {sequence.request_id}: blocks go from 1 to {self._num_blocks}")

    def _decode(self, rows: int) -> Tensor:
        positions = self._positions[:rows]
        tables = self._block_tables[:rows]
        size = self._backend.block_size
        blocks = tables.gather(1, (positions // size).unsqueeze(1)).squeeze(1)
        step = Step(
            slots=blocks * size + positions % size,
            block_tables=tables,
            kv_lengths=(positions + 1).to(torch.int32),
            query_starts=self._row_numbers[: rows + 1],
            decoding=rows,
            chunks=[],
            max_kv_length=self._longest(rows),
        )
        return self._run(self._tokens[:rows], positions, step, None)

    def _mixed_step(self, decoding: int, chunks: list[PromptChunk]) -> tuple[Step, Tensor]:
        """The step's places, and the indices, [rows] int64, of the tokens whose logits are wanted."""
        size = self._backend.block_size
        positions = self._positions[:decoding]
        tables = self._block_tables.new_zeros(decoding + len(chunks), self._block_tables.shape[1])
        tables[:decoding] = self._block_tables[:decoding]
        slots = [tables[:decoding].gather(1, (positions // size).unsqueeze(1)).squeeze(1) * size + positions % size]
        spans, wanted, start = [], list(range(decoding)), decoding
        for index, chunk in enumerate(chunks, start=decoding):
            length = len(chunk.tokens)
            table = torch.tensor(chunk.sequence.blocks, dtype=torch.int32)
            tables[index, : len(table)] = table
            place = torch.arange(chunk.start, chunk.start + length)
            slots.append((table[place // size].long() * size + place % size).to(self._device))
            spans.append(Chunk(start=start, length=length, kv_length=chunk.start + length))
            wanted.extend(range(start + length - chunk.logits, start + length))
            start += length
        lengths = torch.tensor([span.kv_length for span in spans], dtype=torch.int32, device=self._device)
        starts = torch.tensor([span.start + span.length for span in spans], dtype=torch.int32, device=self._device)
        step = Step(
            slots=torch.cat(slots),
            block_tables=tables,
            kv_lengths=torch.cat([(positions + 1).to(torch.int32), lengths]),
            query_starts=torch.cat([self._row_numbers[: decoding + 1], starts]),
            decoding=decoding,
            chunks=spans,
            max_kv_length=max([self._longest(decoding), *(span.kv_length for span in spans)]),
        )
        return step, torch.tensor(wanted, dtype=torch.int64, device=self._device)

    def _longest(self, rows: int) -> int:
        """The most tokens that one of the first `rows` rows has in the cache after this pass."""
        return self._passes + max(self._births[:rows], default=0) + 1

    def _run(self, tokens: Tensor, positions: Tensor, step: Step, wanted: Tensor | None) -> Tensor:
        self._cache.step = step
        output = self._model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=0 if wanted is None else wanted,
        )
        return output.logits[0]

    def _allocate(self, max_batch_size: int, num_blocks: int, max_total_tokens: int) -> None:
        blocks = -(-max_total_tokens // self._backend.block_size) + 1
        self._num_blocks = num_blocks
        self._backend.allocate(num_blocks + 1)
        self._tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=self._device)
        self._positions = torch.zeros(max_batch_size, dtype=torch.int64, device=self._device)
        self._block_tables = torch.zeros(max_batch_size, blocks, dtype=torch.int32, device=self._device)
        self._row_numbers = torch.arange(max_batch_size + 1, dtype=torch.int32, device=self._device)
        self._births = [0] * max_batch_size
        self._passes = 0

    def _run_largest(self, max_batch_size: int, max_prefill_tokens: int) -> None:
        """Runs a prompt as long as a step may compute, and a step after it."""
        tokens = warm_up_tokens(self._model.config, self._device, max_prefill_tokens)
        blocks = -(-tokens // self._backend.block_size)
        self._allocate(max_batch_size, blocks, tokens + 1)
        sequence = Sequence(0, [0] * tokens, StoppingParameters(2), blocks=list(range(1, blocks + 1)))
        self.forward(0, [PromptChunk(sequence, sequence.next_chunk(tokens), start=0, all_logits=False)])
        self.promote(sequence, 0)
        self.forward(1, [])
