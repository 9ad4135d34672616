"""The paged way to run a model: packed batches, keys and values in blocks, nothing rebuilt per token."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tgi_server.contract import StoppingParameters
from tgi_server.engine.attention.base import AttentionBackend, Step
from tgi_server.engine.attention.block_tables import BlockTables
from tgi_server.engine.attention.paged_cache import PagedCache
from tgi_server.engine.errors import InvalidCall, NotEnoughMemory
from tgi_server.engine.layers import ScreenedHead
from tgi_server.engine.memory import cache_bytes, forget_peak, taken_by
from tgi_server.engine.models.chunk_places import place_chunks
from tgi_server.engine.models.decode_graphs import DecodeGraphs, ladder, record_decoding, recorder_for
from tgi_server.engine.models.limits import UNBOUNDED_POSITIONS, position_limit, warm_up_tokens
from tgi_server.engine.models.rope import LengthDependentRope
from tgi_server.engine.models.runner import Capacity, Likeliest, PromptChunk, Runner
from tgi_server.engine.sequence import Sequence
from tgi_server.engine.sharding import ShardGroup

_RESERVED_TOKENS = 1 << 15
"""For which memory is taken before they come."""
_RESERVED_WEIGHTS = 4
"""No more bytes than the weights take, times this: a small model shall stay small."""
_RESERVE_SECONDS = 1.0  # of the start


class PagedRunner(Runner):
    """Batch state lives in preallocated tensors on the device:

    tokens: [rows] int64; the next input of each row. positions: [rows] int64; where it stands in its sequence.
    A row that no sequence has stands at position 0 of the scratch block.

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
        graph_sizes: SequenceOf[int] | None = None,
        weight_bytes: int = 0,
    ) -> None:
        """group: the shards of the model, when this is one of them. graph_sizes: for which numbers of rows steps are
        recorded, where that can be done; None: for those that are usual. weight_bytes: of the model.
        """
        self._model = model
        self._backend = backend
        self._device = backend.device
        self.block_size = backend.block_size
        self._memory_fraction = memory_fraction
        self._cpu_memory = cpu_memory
        self._group = group
        self._graph_sizes = graph_sizes
        self._weight_bytes = weight_bytes
        self._num_blocks = 0
        self._highest_block = 0  # that a sequence has had
        self._reserved = 0  # blocks whose memory is taken before they are needed
        self._recorded = True  # until it turns out that steps cannot be recorded
        self._graphs: DecodeGraphs | None = None
        self._rope = LengthDependentRope(model)
        self._head = model.get_output_embeddings()
        self._cache = PagedCache(backend)
        self._cache.attach(model)

    def warm_up(self, max_batch_size: int, max_prefill_tokens: int, max_total_tokens: int | None) -> Capacity:
        size = self._backend.block_size
        limit = max_total_tokens or position_limit(self._model.config) or UNBOUNDED_POSITIONS
        self._graphs = None
        self._run_largest(max_batch_size, max_prefill_tokens)
        with taken_by(self._device) as graphs:
            self._record()
        self._graphs = None
        token_bytes = self._backend.shape.bytes_per_token(self._backend.dtype)
        processes = self._group.local_world_size if self._group else 1
        free = cache_bytes(self._device, self._memory_fraction, self._cpu_memory, processes) - graphs.bytes
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
        self._reserved = min(_RESERVED_TOKENS, _RESERVED_WEIGHTS * self._weight_bytes // token_bytes) // size
        self.reserve(_RESERVE_SECONDS)
        self._rope.fix(total)
        self._record()
        return Capacity(num_blocks, size, max_total_tokens=total, max_batch_total_tokens=num_blocks * size)

    def reserve(self, seconds: float) -> bool:
        return self._backend.reserve(min(self._num_blocks, self._highest_block + self._reserved) + 1, seconds)

    def forward(self, decoding: int, chunks: list[PromptChunk], likeliest: Likeliest | None = None) -> Tensor:
        self._block_tables.flush()
        if isinstance(self._head, ScreenedHead):
            self._head.likeliest_only = likeliest is not None
            self._head.mask = likeliest.mask if likeliest else None
        logits = self._mixed(decoding, chunks) if chunks else self._decode(decoding)
        self._positions[:decoding] += 1
        self._passes += 1
        return logits

    def join(self, sequence: Sequence) -> None:
        self._check(sequence, sequence.blocks)
        if sequence.copy:
            self._backend.copy(sequence.copy.source, sequence.copy.target, sequence.copy.tokens)

    def promote(self, sequence: Sequence, row: int) -> None:
        self._positions[row] = len(sequence.known)
        self._births[row] = len(sequence.known) - self._passes
        self._block_tables.extend(row, 0, sequence.blocks)
        self._rows = row + 1

    def accept(self, first_row: int, token_ids: Tensor) -> None:
        self._tokens[first_row : first_row + len(token_ids)] = token_ids

    def grant(self, sequence: Sequence, row: int | None, blocks: list[int]) -> None:
        self._check(sequence, blocks)
        first = len(sequence.blocks)
        sequence.blocks.extend(blocks)
        if row is not None:
            self._block_tables.extend(row, first, blocks)

    def move(self, source: int, target: int) -> None:
        self._tokens[target] = self._tokens[source]
        self._positions[target] = self._positions[source]
        self._births[target] = self._births[source]
        self._block_tables.move(source, target)

    def truncate(self, rows: int) -> None:
        """Nothing of these rows may stay: padded steps compute them, too, and write where they point to."""
        self._positions[rows : self._rows] = 0
        self._block_tables.clear(rows, self._rows)
        self._rows = rows

    def leave(self, sequence: Sequence) -> None:
        """Nothing to do: a sequence without a row lives in its own object only."""

    def _check(self, sequence: Sequence, blocks: list[int]) -> None:
        """Raises InvalidCall for blocks that were never handed out: kernels write wherever they are told to."""
        if not blocks:
            return
        highest = max(blocks)
        if not 0 < min(blocks) <= highest <= self._num_blocks:
            raise InvalidCall(f"request {sequence.request_id}: blocks go from 1 to {self._num_blocks}")
        self._highest_block = max(self._highest_block, highest)

    def _decode(self, rows: int) -> Tensor:
        logits = self._graphs.run(rows) if self._graphs else None
        return self._decode_rows(rows, self._longest(rows)) if logits is None else logits

    def _decode_rows(self, rows: int, longest: int) -> Tensor:
        """longest: no row has more tokens than that, the one of this pass included."""
        positions = self._positions[:rows]
        tables = self._block_tables.table[:rows]
        step = Step(
            slots=self._slots(positions, tables),
            block_tables=tables,
            kv_lengths=(positions + 1).to(torch.int32),
            query_starts=self._row_numbers[: rows + 1],
            decoding=rows,
            chunks=[],
            max_kv_length=longest,
        )
        return self._run(self._tokens[:rows], positions, step, None)

    def _mixed(self, decoding: int, chunks: list[PromptChunk]) -> Tensor:
        places = place_chunks(chunks, decoding, self._backend.block_size, self._device)
        positions = self._positions[:decoding]
        running = self._block_tables.table[:decoding]
        tables = running.new_zeros(decoding + len(chunks), running.shape[1])
        tables[:decoding] = running
        tables[decoding:, : places.tables.shape[1]] = places.tables
        step = Step(
            slots=torch.cat([self._slots(positions, running), places.slots]),
            block_tables=tables,
            kv_lengths=torch.cat([(positions + 1).to(torch.int32), places.kv_lengths]),
            query_starts=torch.cat([self._row_numbers[: decoding + 1], places.ends]),
            decoding=decoding,
            chunks=places.chunks,
            max_kv_length=max([self._longest(decoding), *(chunk.kv_length for chunk in places.chunks)]),
        )
        tokens = torch.cat([self._tokens[:decoding], places.tokens])
        return self._run(tokens, torch.cat([positions, places.positions]), step, places.wanted)

    def _slots(self, positions: Tensor, tables: Tensor) -> Tensor:
        """[rows] int64: where a token at each row's position goes."""
        size = self._backend.block_size
        blocks = tables.gather(1, (positions // size).unsqueeze(1)).squeeze(1)
        return blocks * size + positions % size

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
        self._highest_block = 0
        self._backend.allocate(num_blocks + 1)
        self._tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=self._device)
        self._positions = torch.zeros(max_batch_size, dtype=torch.int64, device=self._device)
        self._block_tables = BlockTables(max_batch_size, blocks, self._device)
        self._row_numbers = torch.arange(max_batch_size + 1, dtype=torch.int32, device=self._device)
        self._births = [0] * max_batch_size
        self._passes = 0
        self._rows = 0  # that sequences have
        self._max_total_tokens = max_total_tokens

    def _record(self) -> None:
        """Records the steps in which sequences only decode. All shards do, or none."""
        record = recorder_for(self._backend)
        sizes = ladder(self._graph_sizes, len(self._tokens))
        if record is None or not sizes or not self._recorded:
            return
        self._graphs = record_decoding(sizes, lambda rows: self._decode_rows(rows, self._max_total_tokens), record)
        self._recorded = self._graphs is not None
        if self._group and not self._group.minimum(int(self._recorded)):
            self._recorded, self._graphs = False, None

    def _run_largest(self, max_batch_size: int, max_prefill_tokens: int) -> None:
        """Runs a prompt as long as a step may compute, and a step after it."""
        tokens = warm_up_tokens(self._model.config, self._device, max_prefill_tokens)
        blocks = -(-tokens // self._backend.block_size)
        self._allocate(max_batch_size, blocks, tokens + 1)
        forget_peak(self._device)
        sequence = Sequence(0, [0] * tokens, StoppingParameters(2), blocks=list(range(1, blocks + 1)))
        self._rope.fix(tokens + 1)
        self.forward(0, [PromptChunk(sequence, sequence.next_chunk(tokens), start=0, all_logits=False)])
        self.promote(sequence, 0)
        self.forward(1, [])
        self.truncate(0)
