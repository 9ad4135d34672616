from tests.fakes.recording_sink import recorded_request
from tgi_server.router.scheduling.batch import WaitingQueue
from tgi_server.router.scheduling.sequence import Sequence


def _sequence(request_id: int) -> Sequence:
    return Sequence(recorded_request(request_id, [1])[0])


def _filled(*ids: int) -> WaitingQueue:
    queue = WaitingQueue()
    for request_id in ids:
        queue.add(_sequence(request_id))
    return queue


def _order(queue: WaitingQueue) -> list[int]:
    return [sequence.id for sequence in queue]


def test_first_come_first_served() -> None:
    assert _order(_filled(3, 1, 2)) == [3, 1, 2]


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
