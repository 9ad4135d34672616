"""How many requests may be in flight."""

from collections.abc import Iterator
from contextlib import contextmanager

from tgi_server.router.errors import Overloaded


class Capacity:
    """Counts the sequences that clients wait for; whoever comes when it is full is turned away at once."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.in_flight = 0

    def take(self, sequences: int) -> None:
        """Raises Overloaded."""
        if self.in_flight + sequences > self._limit:
            raise Overloaded(f"the server is busy: {self._limit} requests are in flight; try again later")
        self.in_flight += sequences

    @contextmanager
    def places(self, sequences: int) -> Iterator[None]:
        """Holds places within the context. Raises Overloaded."""
        self.take(sequences)
        try:
            yield
        finally:
            self.give_back(sequences)

    def give_back(self, sequences: int) -> None:
        self.in_flight -= sequences
