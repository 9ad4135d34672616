"""Rows of the running batch as sequences come and go, with a runner and a sampler that only take notes."""

from typing import Any

import pytest

from tgi_server.contract import StoppingParameters
from tgi_server.engine import RunningSequence
from tgi_server.engine.batch import RunningBatch
from tgi_server.engine.errors import InvalidCall
from tgi_server.engine.runners.base import PromptChunk


class Notes:
    """Stands in for a runner and a sampler: notes each call."""

    paged = True
    block_size = 4

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


def sequence(request_id: int) -> RunningSequence:
    return RunningSequence(request_id, [1, 2, 3], StoppingParameters(9), blocks=[1, 2])


@pytest.fixture
def runner() -> Notes:
    return Notes()


@pytest.fixture
def batch(runner: Notes) -> RunningBatch:
    """Returns a batch of four sequences in rows 0 to 3."""
    batch = RunningBatch(1, runner, Notes(), max_size=5, cheap_tokens=8)  # type: ignore[arg-type]
    for request_id in (10, 11, 12, 13):
        batch.join(member := sequence(request_id))
        batch.promote(member)
    runner.calls.clear()
    return batch


def moves(runner: Notes) -> list[tuple[Any, ...]]:
    return [call for call in runner.calls if call[0] != "leave"]


def row_order(batch: RunningBatch) -> list[int]:
    return [member.request_id for member in batch.rows]


def test_the_last_row_takes_the_place_of_one_that_leaves(batch, runner) -> None:
    batch.drop([11])
    assert row_order(batch) == [10, 13, 12]
    assert moves(runner) == [("move", 3, 1), ("truncate", 3)]
    assert [member.request_id for _, member in runner.calls[:1]] == [11]
    batch.grant(13, [7])
    assert runner.calls[-1] == ("grant", batch.rows[1], 1, [7])


def test_the_last_row_leaves_without_a_move(batch, runner) -> None:
    batch.keep([10, 11, 12])
    assert row_order(batch) == [10, 11, 12]
    assert moves(runner) == [("truncate", 3)]


def test_a_sequence_in_its_prompt_has_no_row(batch, runner) -> None:
    batch.join(late := sequence(14))
    assert 14 in batch
    assert len(batch) == 5
    batch.grant(14, [7])
    assert runner.calls[-1] == ("grant", late, None, [7])
    batch.drop([14])
    assert 14 not in batch


def test_requests_that_are_not_there_are_passed_over(batch, runner) -> None:
    batch.drop([99])
    batch.grant(99, [7])
    assert runner.calls == []


def test_what_cannot_join_is_refused(batch) -> None:
    with pytest.raises(InvalidCall, match="request 12 is in the batch already"):
        batch.join(sequence(12))
    batch.join(sequence(14))
    with pytest.raises(InvalidCall, match="the batch is full: it has 5 sequences"):
        batch.join(sequence(15))


def test_a_sequence_with_jump_forward_tokens_leaves_its_row_until_they_are_computed(batch) -> None:
    member = batch.rows[1]
    member.next_chunk(3)
    member.append([4, 5])
    batch.leave_row(member, 2)
    assert row_order(batch) == [10, 13, 12]
    assert batch.jumping() == [member]
    member.next_chunk(member.remaining)
    assert batch.jumping() == []
    batch.promote(member)
    assert row_order(batch) == [10, 13, 12, 11]
    assert not member.jumping


def chunk_of(member: RunningSequence, tokens: int, **options) -> PromptChunk:
    return PromptChunk.next_of(member, tokens, **options)


def test_a_step_plans_who_gets_a_token_from_which_logits(batch) -> None:
    for request_id in (20, 21):
        batch.drop([request_id - 10])
        batch.join(sequence(request_id))
    batch.drop([13])
    first, second = batch.prefilling.values()
    half, whole = chunk_of(first, 2, all_logits=True), chunk_of(second, 3)
    plan = batch.plan([half, whole], decode=True)
    assert (plan.decoding, plan.first_row) == (1, 0)
    assert [member.request_id for member in plan.sequences] == [12, 21]
    assert plan.picked == [0, 3]
    assert plan.top_logits is None
    plan = batch.plan([chunk_of(first, 1)], decode=False)
    assert (plan.decoding, plan.first_row, plan.picked) == (0, 1, [0])
    assert plan.sequences == [first]
    assert plan.top_logits == 1


def test_jump_forward_tokens_take_what_a_step_has_to_spare(batch) -> None:
    assert batch.jump_forward_budget() == 4
    for member in batch.rows:
        member.constraint = object()  # type: ignore[assignment]
    assert batch.jump_forward_budget() == 32
