"""The input of forward passes made from the tensors of a batch, in blocks of four tokens."""

import pytest
import torch

from tgi_server.contract import StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.backends.attention.base import KVShape
from tgi_server.engine.backends.attention.gather import GatherAttention
from tgi_server.engine.backends.base import TopOnly
from tgi_server.engine.runners.base import PromptChunk
from tgi_server.engine.runners.paged_batch import PagedBatch

BLOCK = 4


@pytest.fixture
def batch() -> PagedBatch:
    """Returns a batch whose rows 0 and 1 stand at positions 5 and 2."""
    attention = GatherAttention(KVShape((1,), 8), torch.device("cpu"), torch.float32)
    attention.block_size = BLOCK
    batch = PagedBatch(rows=4, num_blocks=9, max_total_tokens=12, attention=attention)
    batch.place(0, 5, [3, 7])
    batch.place(1, 2, [4])
    batch.tokens[:2] = torch.tensor([50, 60])
    batch.block_tables.flush()
    return batch


def chunk(tokens: int, blocks: list[int], computed: int = 0, **options) -> PromptChunk:
    sequence = RunningSequence(9, list(range(10, 17)), StoppingParameters(3), blocks=blocks, computed=computed)
    return PromptChunk.next_of(sequence, tokens, **options)


def test_rows_that_decode_write_behind_their_last_token(batch) -> None:
    inputs = batch.decode_input(2)
    assert inputs.tokens.tolist() == [50, 60]
    assert inputs.positions.tolist() == [5, 2]
    assert inputs.wanted is None
    assert inputs.metadata.slots.tolist() == [7 * BLOCK + 1, 4 * BLOCK + 2]
    assert inputs.metadata.kv_lengths.tolist() == [6, 3]
    assert inputs.metadata.query_starts.tolist() == [0, 1, 2]
    assert inputs.metadata.query_counts.tolist() == [1, 1]
    assert inputs.metadata.max_kv_length == 6
    assert inputs.top is None


def test_every_row_that_decodes_advances_by_a_position(batch) -> None:
    batch.advance(2)
    assert batch.decode_input(2).positions.tolist() == [6, 3]
    assert batch.decode_input(2).metadata.max_kv_length == 7
    batch.place(2, 3, [8])
    batch.block_tables.flush()
    batch.advance(3)
    inputs = batch.decode_input(3)
    assert inputs.positions.tolist() == [7, 4, 4]
    assert inputs.metadata.max_kv_length == 8


def test_only_rows_with_a_sequence_follow_their_tokens(batch) -> None:
    batch.follow(torch.tensor([7, 8, 9]))
    batch.count_pass()
    inputs = batch.decode_input(3)
    assert inputs.tokens.tolist() == [7, 8, 9]
    assert inputs.positions.tolist() == [6, 3, 0]
    assert inputs.metadata.max_kv_length == 7


def test_prompt_chunks_come_behind_the_rows(batch) -> None:
    top = TopOnly(1, None)
    inputs = batch.mixed_input(1, [chunk(3, [1, 2], computed=2), chunk(7, [5, 6])], top)
    assert inputs.tokens.tolist() == [50, 12, 13, 14, *range(10, 17)]
    assert inputs.positions.tolist() == [5, 2, 3, 4, *range(7)]
    metadata = inputs.metadata
    assert metadata.slots[:4].tolist() == [7 * BLOCK + 1, BLOCK + 2, BLOCK + 3, 2 * BLOCK]
    assert metadata.kv_lengths.tolist() == [6, 5, 7]
    assert metadata.query_starts.tolist() == [0, 1, 4, 11]
    assert metadata.block_tables[:, :2].tolist() == [[3, 7], [1, 2], [5, 6]]
    assert metadata.max_kv_length == 7
    assert inputs.top is top
    assert [(span.start, span.length, span.kv_length) for span in metadata.chunks] == [(1, 3, 5), (4, 7, 7)]


@pytest.mark.parametrize(
    ("tokens", "all_logits", "wanted"), [(3, False, [0]), (3, True, [0, 1, 2, 3]), (7, False, [0, 7])]
)
def test_logits_are_wanted_of_rows_and_of_the_last_token_or_of_all(batch, tokens, all_logits, wanted) -> None:
    inputs = batch.mixed_input(1, [chunk(tokens, [1, 2], all_logits=all_logits)], None)
    assert inputs.wanted is not None
    assert inputs.wanted.tolist() == wanted


def test_a_row_that_was_moved_takes_its_position_along(batch) -> None:
    batch.advance(2)
    batch.move(1, 0)
    batch.truncate(1)
    inputs = batch.decode_input(1)
    assert inputs.positions.tolist() == [3]
    assert inputs.tokens.tolist() == [60]
    assert inputs.metadata.block_tables.tolist() == [[4, 0, 0, 0]]
    assert inputs.metadata.max_kv_length == 4


def test_rows_without_a_sequence_write_into_the_scratch_block(batch) -> None:
    batch.truncate(1)
    inputs = batch.decode_input(3, longest=12)
    assert inputs.metadata.slots.tolist() == [7 * BLOCK + 1, 0, 0]
    assert inputs.metadata.max_kv_length == 12
