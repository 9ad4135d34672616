"""What the CUDA backend tells its kernels, which tests/gpu_without checks. They have a stand-in here."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.unit.engine.backends.attention.test_backends import expected
from tgi_server.engine.backends.attention.base import AttentionVariant, ChunkSpan, ForwardMetadata
from tgi_server.engine.backends.attention.cuda import Lengths, _tile_kinds, _tiles


@pytest.mark.parametrize("tokens", [1, 3, 64])
def test_tiles_of_rows_with_drafts_cover_every_token_once(tokens: int) -> None:
    """Rows of four tokens each, as if they were chunks of prompts."""
    before = [0, 5, 100]
    chunks = metadata([], [(each, 4) for each in before])
    rows = replace(chunks, decoding=3, chunks=[], row_tokens=4)
    wanted, tiles = (_tiles(each, tokens, Lengths.ANY) for each in (chunks, rows))
    used = tiles.counts > 0
    for name in ("first", "counts", "kv_lengths", "sequences"):
        assert getattr(tiles, name)[used].tolist() == getattr(wanted, name)[used].tolist()


def metadata(decodes: list[int], prompts: list[tuple[int, int]]) -> ForwardMetadata:
    """decodes: tokens of each sequence. prompts: (tokens before, tokens of the chunk)."""
    counts = [1] * len(decodes) + [count for _, count in prompts]
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lengths = decodes + [before + count for before, count in prompts]
    chunks = [
        ChunkSpan(int(start), count, before + count)
        for start, (before, count) in zip(starts[len(decodes) :], prompts, strict=False)
    ]
    return ForwardMetadata(
        slots=torch.zeros(sum(counts), dtype=torch.int64),
        block_tables=torch.zeros(len(lengths), 1, dtype=torch.int32),
        kv_lengths=torch.tensor(lengths, dtype=torch.int32),
        query_starts=starts,
        decoding=len(decodes),
        chunks=chunks,
        max_kv_length=max(lengths),
    )


def attended(queries: Tensor, keys: list[Tensor], values: list[Tensor], tokens: int, passed: ForwardMetadata) -> Tensor:
    """Attends tile by tile, as the kernels are told to; each token once."""
    output = torch.full_like(queries, torch.nan)
    for most, kind in _tile_kinds(passed, tokens):
        tiles = _tiles(passed, most, kind)
        fields = torch.stack([tiles.first, tiles.counts, tiles.kv_lengths, tiles.sequences])
        assert fields.dtype is torch.int32
        for first, count, length, sequence in fields[:, tiles.counts > 0].T.tolist():
            assert count <= most
            span = slice(first, first + count)
            assert output[span].isnan().all()
            output[span] = expected(
                queries[span], keys[sequence][:length], values[sequence][:length], AttentionVariant(0.3)
            )
    return output


@pytest.mark.parametrize("tokens", [1, 16, 64])
@pytest.mark.parametrize(
    ("decodes", "prompts"), [([1, 7, 100], [(0, 1), (0, 50), (40, 37), (96, 64)]), ([], [(0, 40), (31, 2)])]
)
def test_tiles_cover_every_token_once(tokens: int, decodes: list[int], prompts: list[tuple[int, int]]) -> None:
    passed = metadata(decodes, prompts)
    lengths = passed.kv_lengths.tolist()
    keys = [torch.randn(length, 2, 8) for length in lengths]
    values = [torch.randn(length, 2, 8) for length in lengths]
    queries = torch.randn(len(passed.slots), 4, 8)
    parts = queries.split(passed.query_starts.diff().tolist())
    wanted = torch.cat([expected(*each, AttentionVariant(0.3)) for each in zip(parts, keys, values, strict=True)])
    torch.testing.assert_close(attended(queries, keys, values, tokens, passed), wanted)


def test_sequences_that_decode_are_tiles_of_their_own() -> None:
    tiles = _tiles(metadata([5, 9], []), 1, Lengths.ANY)
    fields = (tiles.first, tiles.counts, tiles.kv_lengths, tiles.sequences)
    assert [field.tolist() for field in fields] == [[0, 1], [1, 1], [5, 9], [0, 1]]
    assert {field.dtype for field in fields} == {torch.int32}
