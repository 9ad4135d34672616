"""The tensors of the batch that runs on the paged path, and the input of each forward pass made from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_server.engine.backends.attention.base import AttentionBackend, ChunkSpan, ForwardMetadata
from tgi_server.engine.backends.base import PassInput, TopOnly
from tgi_server.engine.backends.lora import AdapterRows
from tgi_server.engine.backends.states import SCRATCH_SLOT
from tgi_server.engine.memory import copy_to_device
from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.runners.block_tables import BlockTables

NO_TOKEN = -1


class PagedBatch:
    """Preallocated tensors, updated in place; nothing is rebuilt per token.

    tokens: [rows] int64; the next input of each row. positions: [rows] int64; its position in its sequence.
    drafted: [rows, most] int64; the tokens drafted after each row's next input, and then -1.
    adapters: [rows] int32; the number of each row's adapter, 0 for none.
    rope_deltas: [rows] int64; each row's rotary positions less its positions.
    state_slots: the slot of each row's states, on the host. row_slots: [rows] int64; the same on the device.
    A row without a sequence is at position 0 of the scratch block.

    A row advances by one position a pass, and by the drafted tokens that the host knows to be right. So the host knows
    every position without asking the device: it is the number of passes so far plus the row's position offset.
    """

    def __init__(
        self,
        rows: int,
        num_blocks: int,
        max_total_tokens: int,
        attention: AttentionBackend,
        most_drafted: int = 0,
        *,
        mrope: bool = False,
    ) -> None:
        """num_blocks: KV blocks for sequences, ids 1 .. num_blocks. max_total_tokens: maximum tokens of one sequence.

        attention: attends to the blocks. mrope: rotary positions may differ from positions.
        """
        block_size, device = attention.block_size, attention.device
        self.num_blocks = num_blocks
        self.max_total_tokens = max_total_tokens
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.adapters = torch.zeros(rows, dtype=torch.int32, device=device)
        self.rope_deltas = torch.zeros(rows, dtype=torch.int64, device=device)
        self.block_tables = BlockTables(rows, -(-max_total_tokens // block_size) + 1, device)
        self.drafted = torch.full((rows, most_drafted), NO_TOKEN, dtype=torch.int64, device=device)
        self._ahead = torch.arange(1 + most_drafted, dtype=torch.int64, device=device)
        self._row_numbers = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._one_each = torch.ones(rows, dtype=torch.int32, device=device)
        self._position_offsets = [0] * rows
        self._adapters = [0] * rows  # the same as `adapters`, on the host
        self._rope_deltas = [0] * rows  # the same as `rope_deltas`
        self.state_slots = [SCRATCH_SLOT] * rows
        self.row_slots = torch.full((rows,), SCRATCH_SLOT, dtype=torch.int64, device=device)
        self._passes = 0
        self._rows = 0  # that sequences have
        self._attention = attention
        self._block_size = block_size
        self._device = device
        self._mrope = mrope

    def __len__(self) -> int:
        """Returns the number of rows, including those without a sequence."""
        return len(self.tokens)

    def place(
        self,
        row: int,
        position: int,
        blocks: Sequence[int],
        adapter: int = 0,
        state_slot: int = SCRATCH_SLOT,
        rope_delta: int = 0,
    ) -> None:
        """Gives the first free row to a sequence. position: the position of its next token."""
        self._set_adapter(row, adapter)
        self._set_slot(row, state_slot)
        self.positions[row].fill_(position)  # an assignment would copy from the host, and wait
        self._position_offsets[row] = position - self._passes
        if self._mrope:
            self._rope_deltas[row] = rope_delta
            self.rope_deltas[row].fill_(rope_delta)
        self.block_tables.extend(row, 0, blocks)
        self._rows = row + 1

    def move(self, source: int, target: int) -> None:
        self.tokens[target] = self.tokens[source]
        self.positions[target] = self.positions[source]
        if self._mrope:
            self._rope_deltas[target] = self._rope_deltas[source]
            self.rope_deltas[target] = self.rope_deltas[source]
        self._position_offsets[target] = self._position_offsets[source]
        self._set_adapter(target, self._adapters[source])
        self._set_slot(target, self.state_slots[source])
        self.block_tables.move(source, target)

    def truncate(self, rows: int) -> None:
        """Clears the rows from `rows` on: padded passes compute them, too, and write where they point to."""
        self.positions[rows : self._rows] = 0
        for row in range(rows, self._rows):
            self._set_adapter(row, 0)
            self._set_slot(row, SCRATCH_SLOT)
        self.block_tables.clear(rows, self._rows)
        self._rows = rows

    def advance(self, rows: int) -> None:
        """Notes that a pass is done in which the first `rows` rows decoded."""
        self.positions[:rows] += 1
        self.count_pass()

    def count_pass(self) -> None:
        """Notes on the host that a pass is done which has moved rows on by itself: see `follow`."""
        self._passes += 1

    def follow(self, tokens: Tensor) -> None:
        """Makes tokens, [rows] int64, the next inputs of the first rows. Those with a sequence advance by a position.

        The work on the device is the same whichever rows have a sequence, so a captured step can contain it.
        """
        rows = len(tokens)
        self.tokens[:rows] = tokens
        self.positions[:rows] += self.block_tables.table[:rows, 0] > 0  # block 0 is scratch

    def skip(self, row: int, tokens: int, token_id: int) -> None:
        """Advances a row by `tokens` positions. token_id: its next input."""
        self.positions[row] += tokens
        self._position_offsets[row] += tokens
        self.tokens[row].fill_(token_id)

    def draft(self, drafts: Sequence[tuple[int, Tensor]]) -> None:
        """Sets the drafted tokens of all rows. drafts: rows and their tokens; the other rows have none."""
        drafted = torch.full(self.drafted.shape, NO_TOKEN, dtype=torch.int64)
        for row, tokens in drafts:
            drafted[row, : len(tokens)] = tokens
        self.drafted.copy_(copy_to_device(drafted, self._device))

    def draft_input(self, rows: int) -> PassInput:
        """Returns the input of a pass in which the first `rows` rows decode, each with the most drafted tokens.

        Where a row has fewer, the padding after its drafted tokens is written to the scratch block.
        """
        tokens = torch.cat([self.tokens[:rows, None], self.drafted[:rows]], dim=1)
        real, first = tokens >= 0, self.positions[:rows, None]
        positions = torch.where(real, first + self._ahead, first)
        tables, count = self.block_tables.table[:rows], len(self._ahead)
        metadata = ForwardMetadata(
            slots=torch.where(real, self._slots(positions, tables), 0).flatten(),
            block_tables=tables,
            kv_lengths=(self.positions[:rows] + count).to(torch.int32),
            query_starts=self._row_numbers[: rows + 1] * count,
            decoding=rows,
            chunks=[],
            max_kv_length=self.max_total_tokens + count - 1,
            row_tokens=count,
        )
        rotary = (positions + self.rope_deltas[:rows, None]).flatten() if self._mrope else None
        return PassInput(tokens.clamp_min(0).flatten(), positions.flatten(), metadata, None, rotary=rotary)

    def decode_input(
        self, rows: int, top: TopOnly | None = None, longest: int | None = None, *, any_adapters: bool = False
    ) -> PassInput:
        """Returns the input of a pass in which the first `rows` rows decode, and nothing else is computed.

        longest: an upper bound of the tokens of each row, with the token of this pass; None: it is computed.
        any_adapters: the rows may have other adapters when the pass is run again.
        """
        positions, tables = self.positions[:rows], self.block_tables.table[:rows]
        slots, kv_lengths = self._attention.row_places(positions, tables)
        metadata = ForwardMetadata(
            slots=slots,
            block_tables=tables,
            kv_lengths=kv_lengths,
            query_starts=self._row_numbers[: rows + 1],
            query_counts=self._one_each[:rows],
            decoding=rows,
            chunks=[],
            max_kv_length=self.longest(rows) if longest is None else longest,
            state_slots=self.state_slots[:rows],
            row_slots=self.row_slots[:rows],
        )
        present = None if any_adapters else self.adapted(rows)
        adapters = AdapterRows(self.adapters[:rows], present) if any_adapters or present else None
        return PassInput(self.tokens[:rows], positions, metadata, None, adapters, rotary=self.rotary(rows), top=top)

    def mixed_input(self, decoding: int, chunks: Sequence[PromptChunk], top: TopOnly | None) -> PassInput:
        """Returns the input of a pass in which the first `decoding` rows decode and prompt chunks are computed."""
        prompts = _on_device(chunks, decoding, self._block_size, self._device)
        positions, running = self.positions[:decoding], self.block_tables.table[:decoding]
        slots, kv_lengths = self._attention.row_places(positions, running)
        tables = running.new_zeros(decoding + len(chunks), running.shape[1])
        tables[:decoding] = running
        tables[decoding:, : prompts.tables.shape[1]] = prompts.tables
        metadata = ForwardMetadata(
            slots=torch.cat([slots, prompts.slots]),
            block_tables=tables,
            kv_lengths=torch.cat([kv_lengths, prompts.kv_lengths]),
            query_starts=torch.cat([self._row_numbers[: decoding + 1], prompts.ends]),
            decoding=decoding,
            chunks=prompts.spans,
            max_kv_length=max(self.longest(decoding), *(span.kv_length for span in prompts.spans)),
            state_slots=self.state_slots[:decoding] + [chunk.sequence.state_slot for chunk in chunks],
            row_slots=self.row_slots[:decoding],
        )
        tokens = torch.cat([self.tokens[:decoding], prompts.tokens])
        places = torch.cat([positions, prompts.positions])
        adapters = self._mixed_adapters(decoding, chunks, prompts.wanted)
        return PassInput(tokens, places, metadata, prompts.wanted, adapters, top=top)

    def rotary(self, rows: int) -> Tensor | None:
        """Returns the rotary positions of the first `rows` rows, [rows] int64; None: their positions."""
        return self.positions[:rows] + self.rope_deltas[:rows] if self._mrope else None

    def turned(self, rows: int) -> bool:
        """Returns True if some of the first `rows` rows have rotary positions that are not their positions."""
        return any(self._rope_deltas[:rows])

    def adapted(self, rows: int) -> frozenset[int]:
        """Returns the numbers of the adapters that the first `rows` rows have."""
        return frozenset(self._adapters[:rows]) - {0}

    def _mixed_adapters(self, decoding: int, chunks: Sequence[PromptChunk], wanted: Tensor) -> AdapterRows | None:
        numbers = [chunk.sequence.adapter for chunk in chunks]
        present = self.adapted(decoding).union(numbers) - {0}
        if not present:
            return None
        lengths = [len(chunk.tokens) for chunk in chunks]
        of_prompts = torch.tensor(numbers, dtype=torch.int32).repeat_interleave(
            torch.tensor(lengths), output_size=sum(lengths)
        )
        rows = torch.cat([self.adapters[:decoding], copy_to_device(of_prompts, self._device)])
        return AdapterRows(rows, present, wanted)

    def _set_adapter(self, row: int, adapter: int) -> None:
        if self._adapters[row] != adapter:
            self._adapters[row] = adapter
            self.adapters[row].fill_(adapter)

    def _set_slot(self, row: int, slot: int) -> None:
        if self.state_slots[row] != slot:
            self.state_slots[row] = slot
            self.row_slots[row].fill_(slot)

    def _slots(self, positions: Tensor, tables: Tensor) -> Tensor:
        """Returns the slots of tokens at some positions of each row: [rows, tokens] int64, as positions are."""
        size = self._block_size
        return tables.gather(1, positions // size) * size + positions % size

    def longest(self, rows: int) -> int:
        """Returns the length in the cache, after this pass, of the longest of the first `rows` rows."""
        return self._passes + max(self._position_offsets[:rows], default=0) + 1


@dataclass(frozen=True, slots=True)
class _Prompts:
    """The prompt chunks of a pass.

    tokens, positions, slots: [tokens] int64; those of all chunks, one chunk after the other.
    kv_lengths, ends: [chunks] int32; tokens of each sequence once its chunk is written, and the index after the
    chunk's last token in the pass. tables: [chunks, blocks] int32, no wider than they need to be. wanted: [rows]
    int64; indices, in the whole pass, of the tokens whose logits are needed. spans: the chunks' spans, on the host.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    kv_lengths: Tensor
    ends: Tensor
    tables: Tensor
    wanted: Tensor
    spans: list[ChunkSpan]


def _on_device(chunks: Sequence[PromptChunk], decoding: int, block_size: int, device: torch.device) -> _Prompts:
    """Copies everything that a pass needs to know about its prompt chunks to the device at once.

    decoding: sequences that decode in the same pass. Their tokens come first, and all their logits are wanted.
    """
    tables = _tables(chunks)
    tokens = torch.cat([chunk.tokens for chunk in chunks])
    positions, slots, spans, wanted, start = [], [], [], list(range(decoding)), decoding
    for chunk, table in zip(chunks, tables, strict=True):
        length = len(chunk.tokens)
        place = torch.arange(chunk.start, chunk.start + length)
        positions.append(place)
        slots.append(table[place // block_size] * block_size + place % block_size)
        spans.append(ChunkSpan(start, length, chunk.start + length, chunk.drafted, chunk.saves))
        start += length
        wanted.extend(range(start - chunk.logits, start))
    numbers = [span.kv_length for span in spans] + [span.start + span.length for span in spans] + wanted
    parts = [tokens, *positions, *slots, torch.tensor(numbers), tables.flatten()]
    count, rows = len(tokens), len(chunks)
    sizes = [count, count, count, rows, rows, len(wanted), tables.numel()]
    on_device = copy_to_device(torch.cat(parts), device).split(sizes)
    return _Prompts(
        tokens=on_device[0],
        positions=on_device[1],
        slots=on_device[2],
        kv_lengths=on_device[3].to(torch.int32),
        ends=on_device[4].to(torch.int32),
        tables=on_device[6].to(torch.int32).view(tables.shape),
        wanted=on_device[5],
        spans=spans,
    )


def _tables(chunks: Sequence[PromptChunk]) -> Tensor:
    """Returns the block tables of the chunks' sequences on the host: [chunks, blocks] int64."""
    tables = torch.zeros(len(chunks), max(len(chunk.sequence.blocks) for chunk in chunks), dtype=torch.int64)
    for table, chunk in zip(tables, chunks, strict=True):
        table[: len(chunk.sequence.blocks)] = torch.tensor(chunk.sequence.blocks)
    return tables
