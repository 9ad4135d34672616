from tests.fakes.recording_sink import recorded_request
from tgi_server.router.scheduling.batch import Batch, WaitingQueue
from tgi_server.router.scheduling.memory import PagedMemory, Verdict
from tgi_server.router.scheduling.sequence import Sequence


def _sequence(request_id: int) -> Sequence:
    return Sequence(*recorded_request(request_id, [1]))


def _filled(*ids: int) -> WaitingQueue:
    queue = WaitingQueue()
    for request_id in ids:
        queue.add(_sequence(request_id))
    return queue


def _order(queue: WaitingQueue) -> list[int]:
    return [sequence.id for sequence in queue]


def test_first_come_first_served() -> None:
    assert _order(_filled(1, 2, 3)) == [1, 2, 3]


def test_who_was_put_back_comes_first() -> None:
    queue = _filled(3, 4)
    queue.put_back(_sequence(2))
    queue.put_back(_sequence(1))
    assert _order(queue) == [1, 2, 3, 4]


def test_a_sequence_that_leaves_is_found_no_more() -> None:
    queue = _filled(1, 2, 3)
    first, last = queue.first(), queue.get(3)
    assert first is not None
    assert last is not None
    queue.leave(first)
    queue.leave(last)
    queue.leave(last)
    assert queue.get(3) is None
    assert len(queue) == 1
    assert _order(queue) == [2]


def _batch(*ids: int) -> Batch:
    """A batch of sequences whose prompts, of three tokens each, the first step computes."""
    batch = Batch(PagedMemory(20, 4))
    for request_id in ids:
        sequence = Sequence(*recorded_request(request_id, [request_id, 2, 3]))
        assert batch.admit(sequence, 100) is Verdict.ADMITTED
        batch.compute(sequence, 100)
    batch.sent()
    return batch


def _member(batch: Batch, request_id: int) -> Sequence:
    sequence = batch.get(request_id)
    assert sequence is not None
    return sequence


def test_sequences_grow_at_the_step_at_which_their_blocks_are_full() -> None:
    batch = _batch(1, 2)
    assert batch.growing() == []
    batch.sent()
    assert [sequence.id for sequence in batch.growing()] == [1, 2]
    batch.grow(_member(batch, 1))
    batch.leave(_member(batch, 2))
    batch.sent()
    assert batch.growing() == []
    batch.check()


def test_the_shards_are_told_of_sequences_that_left_without_them() -> None:
    batch = _batch(1, 2, 3)
    batch.leave(_member(batch, 1), dropped_by_shards=True)
    assert not batch.filter_due
    gone = _member(batch, 2)
    batch.leave(gone)
    assert batch.filter_due
    batch.filter_due = False
    batch.leave(gone)
    assert not batch.filter_due
    assert batch.ids() == [3]
    batch.check()


def test_nothing_of_a_disowned_sequence_is_kept() -> None:
    batch = _batch(1, 2)
    batch.disown(_member(batch, 1))
    assert batch.filter_due
    assert (batch.memory.held_tokens, batch.memory.cached_tokens) == (4, 0)
    batch.check()


def test_a_chunk_is_at_most_the_budget() -> None:
    batch = _batch()
    sequence = Sequence(*recorded_request(1, [1] * 10))
    batch.admit(sequence, 100)
    assert [batch.compute(sequence, 4) for _ in range(3)] == [4, 4, 2]
    assert batch.prefilling() == []
    assert batch.decoding()


def test_a_reset_batch_is_another_one() -> None:
    batch = _batch(1)
    before = batch.id
    batch.reset()
    assert (batch.id, len(batch), batch.memory.held_tokens) == (before + 1, 0, 0)
