"""Equal shares among clients: who goes first, by what each has had."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from itertools import count
from time import monotonic
from typing import Generic, TypeVar

T = TypeVar("T")


class Shares:
    """The share that each client has had, divided by its weight: fair queueing (arXiv:2401.00588).

    Who comes back after a pause is put level with those who are there, so that nobody saves up.
    """

    def __init__(self) -> None:
        self._had: defaultdict[str, float] = defaultdict(float)

    def enter(self, client: str, present: Collection[str]) -> None:
        """Notes that work of the client comes. present: the clients of all other work that waits or runs."""
        if not present:
            self._had.clear()
        elif client not in present:
            self._had[client] = max(self._had[client], min(self._had[each] for each in present))

    def charge(self, client: str, cost: float, weight: float = 1.0) -> None:
        """Notes what was done for a client."""
        self._had[client] += cost / weight

    def had(self, client: str) -> float:
        """Returns what the client has had. The client that has had least goes first."""
        return self._had[client]


class FairOrder(Generic[T]):
    """Work of which the clients take turns. The work of a client costs the seconds for which it runs.

    The next work is that of the client that has had least, running work included, and of a client's work the smallest.
    So small work of a client waits for one piece of work of another one at most, however many wait.
    """

    def __init__(
        self, gone: Callable[[T], bool], most_of_one: int | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        """gone: returns True for work that nobody waits for any more. most_of_one: pieces of work of one client that
        may run at a time; None: all.
        """
        self._gone = gone
        self._most_of_one = most_of_one
        self._clock = clock
        self._shares = Shares()
        self._numbers = count()
        self._running: dict[int, tuple[str, float]] = {}  # clients, and when their work began
        self._waiting: dict[str, list[tuple[float, int, T]]] = {}  # heaps: size, number, work

    def __len__(self) -> int:
        """How many pieces of work wait, with some that nobody waits for any more."""
        return sum(map(len, self._waiting.values()))

    def add(self, client: str, work: T, size: float = 0.0) -> int:
        """Has work of a client wait. size: of the work, beside others of the client. Returns the work's number."""
        self._shares.enter(client, {each for each, _ in self._running.values()} | self._waiting.keys())
        number = next(self._numbers)
        heappush(self._waiting.setdefault(client, []), (size, number, work))
        return number

    def begin(self) -> tuple[int, T] | None:
        """Takes the work whose turn it is. Returns it with its number; None if none may run."""
        for each in list(self._waiting):
            self._forget_gone(each)
        client = self._next()
        if client is None:
            return None
        _, number, work = heappop(self._waiting[client])
        self._forget_gone(client)
        self._running[number] = client, self._clock()
        return number, work

    def end(self, number: int) -> bool:
        """Charges work that ends to its client. Returns False if it was not running."""
        if number not in self._running:
            return False
        client, began = self._running.pop(number)
        self._shares.charge(client, self._clock() - began)
        return True

    def drop_beyond(self, most: int) -> T | None:
        """Takes the largest work of the client that has most of it waiting, if more than `most` wait; returns it."""
        for client, waiting in list(self._waiting.items()):
            self._waiting[client] = [each for each in waiting if not self._gone(each[2])]
            heapify(self._waiting[client])
            self._forget_gone(client)
        if len(self) <= most:
            return None
        client = max(self._waiting, key=lambda each: len(self._waiting[each]))
        largest = max(self._waiting[client], key=lambda each: each[:2])
        self._waiting[client].remove(largest)
        heapify(self._waiting[client])
        self._forget_gone(client)
        return largest[2]

    def _next(self) -> str | None:
        """Returns the client whose turn it is; None if none may begin."""
        now = self._clock()
        running: Counter[str] = Counter()
        seconds: defaultdict[str, float] = defaultdict(float)
        for client, began in self._running.values():
            running[client] += 1
            seconds[client] += now - began
        most = self._most_of_one
        able = [client for client in self._waiting if most is None or running[client] < most]
        return min(
            able,
            key=lambda each: (self._shares.had(each) + seconds[each], running[each], self._waiting[each][0][1]),
            default=None,
        )

    def _forget_gone(self, client: str) -> None:
        """Drops the work of a client that nobody waits for any more, as far as it would be next."""
        waiting = self._waiting[client]
        while waiting and self._gone(waiting[0][2]):
            heappop(waiting)
        if not waiting:
            del self._waiting[client]
