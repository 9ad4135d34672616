"""Requests that wait for a place in the running batch, oldest first."""

from collections import OrderedDict

from tgi_server.router.scheduling.sequence import Sequence


class WaitingQueue:
    """First come, first served; a preempted request goes before all others, which came after it."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._sequences

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """To the front, for a sequence that is older than all that wait."""
        self._sequences[sequence.id] = sequence
        self._sequences.move_to_end(sequence.id, last=False)

    def first(self) -> Sequence | None:
        return next(iter(self._sequences.values()), None)

    def take(self, sequence: Sequence) -> None:
        del self._sequences[sequence.id]

    def cancel(self, request_id: int) -> bool:
        """Returns True if the request was waiting."""
        return self._sequences.pop(request_id, None) is not None

    def take_all(self) -> list[Sequence]:
        sequences = list(self._sequences.values())
        self._sequences.clear()
        return sequences
