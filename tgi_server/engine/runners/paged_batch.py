"""Where the tokens of a pass's prompt chunks stand, brought to the device in one copy."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tgi_server.engine.attention.base import Chunk
from tgi_server.engine.memory import copy_to_device
from tgi_server.engine.runners.base import PromptChunk


@dataclass(frozen=True, slots=True)
class ChunkPlaces:
    """tokens, positions, slots: [tokens] int64; of all chunks, one after the other.

    kv_lengths, ends: [chunks] int32; tokens of each sequence once its chunk is written, and the index behind the
    chunk's last token in the pass. tables: [chunks, blocks] int32, no wider than they need to be. wanted: [rows]
    int64; indices of the tokens of the whole pass whose logits are wanted. chunks: the same on the host.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    kv_lengths: Tensor
    ends: Tensor
    tables: Tensor
    wanted: Tensor
    chunks: list[Chunk]


def place_chunks(chunks: Sequence[PromptChunk], decoding: int, block_size: int, device: torch.device) -> ChunkPlaces:
    """decoding: sequences that decode in the same pass. Their tokens come first, and all their logits are wanted."""
    tables = _tables(chunks)
    tokens = torch.cat([chunk.tokens for chunk in chunks])
    positions, slots, spans, wanted, start = [], [], [], list(range(decoding)), decoding
    for chunk, table in zip(chunks, tables, strict=True):
        length = len(chunk.tokens)
        place = torch.arange(chunk.start, chunk.start + length)
        positions.append(place)
        slots.append(table[place // block_size] * block_size + place % block_size)
        spans.append(Chunk(start=start, length=length, kv_length=chunk.start + length))
        start += length
        wanted.extend(range(start - chunk.logits, start))
    numbers = [span.kv_length for span in spans] + [span.start + span.length for span in spans] + wanted
    parts = [tokens, *positions, *slots, torch.tensor(numbers), tables.flatten()]
    count, rows = len(tokens), len(chunks)
    sizes = [count, count, count, rows, rows, len(wanted), tables.numel()]
    on_device = copy_to_device(torch.cat(parts), device).split(sizes)
    return ChunkPlaces(
        tokens=on_device[0],
        positions=on_device[1],
        slots=on_device[2],
        kv_lengths=on_device[3].to(torch.int32),
        ends=on_device[4].to(torch.int32),
        tables=on_device[6].to(torch.int32).view(tables.shape),
        wanted=on_device[5],
        chunks=spans,
    )


def _tables(chunks: Sequence[PromptChunk]) -> Tensor:
    """[chunks, blocks] int64, on the host."""
    tables = torch.zeros(len(chunks), max(len(chunk.sequence.blocks) for chunk in chunks), dtype=torch.int64)
    for table, chunk in zip(tables, chunks, strict=True):
        table[: len(chunk.sequence.blocks)] = torch.tensor(chunk.sequence.blocks)
    return tables
