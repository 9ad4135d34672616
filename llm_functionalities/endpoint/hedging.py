"""Hedged requests: if an answer is late, the prompt is also sent to another endpoint, and the first answer is used.

Dean and Barroso, "The Tail at Scale", 2013. A budget keeps hedges from adding to an overload.
"""

import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from llm_functionalities.endpoint.call import Call
from llm_functionalities.errors import ModelError

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Maximum number of hedges that may be sent at once after a time without any.
MOST_SAVED = 10.0

# The 95th percentile is that of the last LATENCIES requests, if there are ENOUGH_LATENCIES, computed every EVERY
# requests.
LATENCIES, ENOUGH_LATENCIES, EVERY = 512, 20, 16

# An endpoint counts as stalling if STALLS of its RECENT requests were very late, or were answered by a hedge.
RECENT, STALLS = 50, 3
LATE_BY_FAR = 2.0

# Outcomes of hedges: the second answer came first, came later, or failed; or the budget had no hedge left.
WON, LOST, FAILED, NO_BUDGET = "won", "lost", "failed", "no_budget"

Attempt = Callable[[Call], Generator[T, None, None]]


class Hedging:
    """Sends late requests a second time, on average at most `budget` hedges per call. Thread-safe."""

    def __init__(
        self, after: float | None, *, budget: float | None = 0.1, threads: int = 16, count: Callable[[str], None]
    ) -> None:
        """after: seconds after which a request is late; None: the 95th percentile of the last calls.

        budget: None: unlimited. threads: maximum number of concurrent hedges. count: called with each hedge's outcome.
        """
        self._after = after
        self._budget = budget or 0.0
        self._count = count
        self._most_saved = math.inf if budget is None else MOST_SAVED
        self._saved = self._most_saved
        self._latencies: dict[str, _Latencies] = {}
        self._late: dict[str, deque[bool]] = {}
        self._stalling: set[str] = set()
        self._lock = threading.Lock()
        self._timers = _Timers()
        self._threads = ThreadPoolExecutor(threads, "hedge")

    def stalls(self, endpoint: str) -> bool:
        """Returns True if an endpoint stalls intermittently."""
        return endpoint in self._stalling

    def race(
        self,
        kind: str,
        call: Call,
        first: Attempt[T],
        second: Callable[[Call], Attempt[T] | None],
        after: float | None = None,
    ) -> Generator[T, None, None]:
        """Yields the pieces of the attempt whose first piece comes first; the other attempt is cancelled.

        kind: a name for requests of similar duration. first: the first attempt, which runs in this thread. second:
        returns the second attempt, given the call of the first; None if there is no endpoint for it. after: seconds
        after which this request is late; None: as for all requests. Raises ModelError.
        """
        race = _Race[T](call)
        begun = time.monotonic()
        with self._lock:
            self._saved = min(self._most_saved, self._saved + self._budget)
            latencies = self._latencies.setdefault(kind, _Latencies())
            if after is None:
                after = self._after if self._after is not None else latencies.percentile
        if after is not None:
            self._timers.add(begun + after, lambda: self._hedge(race, second))
        waits = True
        try:
            with closing(race.run(first)) as pieces:
                for piece in pieces:
                    if waits:
                        waits = False
                        self._note(race, latencies, begun, answered=True)
                    yield piece
        finally:
            if waits:
                self._note(race, latencies, begun, answered=False)
            race.end()

    def _note(self, race: "_Race[T]", latencies: "_Latencies", begun: float, *, answered: bool) -> None:
        """Records the latency of the first piece, and if the first endpoint was very late.

        answered: True if there is a first piece. If several endpoints were tried, nothing is recorded.
        """
        if (endpoint := race.first_endpoint) is None:
            return
        seconds = time.monotonic() - begun
        with self._lock:
            usual = latencies.percentile
            late = race.won_by_second or (usual is not None and seconds > LATE_BY_FAR * usual)
            if answered and not race.won_by_second:
                latencies.add(endpoint, seconds)
            if not answered and not late:
                return  # it failed, or the call was cancelled
            recent = self._late.setdefault(endpoint, deque(maxlen=RECENT))
            recent.append(late)
            if sum(recent) < STALLS:
                self._stalling.discard(endpoint)
            elif endpoint not in self._stalling:
                self._stalling.add(endpoint)
                logger.warning("endpoint %s stalls intermittently; preferring others", endpoint)

    def _hedge(self, race: "_Race[T]", second: Callable[[Call], Attempt[T] | None]) -> None:
        attempt = None if race.decided else second(race.calls[0])
        if attempt is None:
            return
        if self._saved < 1:
            self._count(NO_BUDGET)
        elif race.begin_second():
            with self._lock:
                self._saved -= 1
            try:
                self._threads.submit(lambda: self._count(race.run_second(attempt)))
            except RuntimeError as error:  # the system refuses a thread, or the service stops
                logger.warning("no thread for a hedge: %s", error)
                race.end_second()

    def stop(self) -> None:
        """Ends all threads."""
        self._timers.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Latencies:
    """Latencies in seconds of the last requests of a kind that their first endpoint answered.

    percentile: the lowest 95th percentile of all endpoints, since that of an endpoint that stalls may be a stall; None
    if there are too few latencies. Requests that a hedge answered do not count: they would make later hedges later.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}
        self._count = 0
        self.percentile: float | None = None

    def add(self, endpoint: str, seconds: float) -> None:
        self._seconds.setdefault(endpoint, deque(maxlen=LATENCIES)).append(seconds)
        self._count += 1
        if self._count % EVERY == 0:
            known = [latencies for latencies in self._seconds.values() if len(latencies) >= ENOUGH_LATENCIES]
            self.percentile = min((sorted(each)[int(0.95 * len(each))] for each in known), default=None)


class _Race(Generic[T]):
    """Two attempts at one prompt: one in the thread of its call, and perhaps one in another thread."""

    def __init__(self, call: Call) -> None:
        self.calls = call.attempt(), call.attempt()
        self._call = call
        self._lock = threading.Lock()
        self._winner: int | None = None
        self._second_begun = False
        # What the second attempt yields, then None.
        self._pieces: SimpleQueue[T | ModelError | None] = SimpleQueue()

    @property
    def first_endpoint(self) -> str | None:
        """The endpoint of the first attempt; None if it had several."""
        tried = self.calls[0].tried
        return next(iter(tried)) if len(tried) == 1 else None

    @property
    def won_by_second(self) -> bool:
        return self._winner == 1

    @property
    def decided(self) -> bool:
        return self._winner is not None

    def run(self, first: Attempt[T]) -> Generator[T, None, None]:
        """Yields the winner's pieces. Raises ModelError, that of the first attempt if both fail."""
        try:
            with closing(first(self.calls[0])) as pieces:
                for number, piece in enumerate(pieces):
                    if not number and not self._claim(0):
                        break
                    yield piece
                else:
                    self._claim(0)
        except ModelError as error:
            if self._winner == 0 or not self._is_second_running():
                raise
            yield from self._of_second(error)
        else:
            if self._winner == 1:
                yield from self._of_second(None)

    def begin_second(self) -> bool:
        """Returns False if the race is decided already."""
        with self._lock:
            self._second_begun = self._winner is None
            return self._second_begun

    def run_second(self, attempt: Attempt[T]) -> str:
        """Runs the second attempt. Returns how it ended."""
        outcome = FAILED
        try:
            with closing(attempt(self.calls[1])) as pieces:
                for piece in pieces:
                    if not self._claim(1):
                        break
                    outcome = WON
                    self._pieces.put(piece)
        except ModelError as error:
            self._pieces.put(error)
        except Exception:
            logger.exception("a hedge failed; this is a bug, please report it")
        finally:
            self.end_second()
        return LOST if self._winner == 0 else outcome

    def end_second(self) -> None:
        """Records that the second attempt has ended."""
        self._pieces.put(None)

    def end(self) -> None:
        """Ends the attempts that still run."""
        self._claim(0)
        for call in self.calls:
            call.cancel()

    def _claim(self, number: int) -> bool:
        """Returns True for the attempt that is the first to have a piece, and cancels the other one."""
        with self._lock:
            if self._winner is None:
                self._winner = number
                self.calls[1 - number].cancel()
            return self._winner == number

    def _is_second_running(self) -> bool:
        """Returns True if the second attempt has begun. If not, it cannot begin any more."""
        with self._lock:
            if not self._second_begun:
                self._winner = 0
            return self._second_begun

    def _of_second(self, error: ModelError | None) -> Iterator[T]:
        begun = False
        while True:
            try:
                piece = self._pieces.get(timeout=self._call.remaining())
            except Empty:
                self._call.remaining()  # raises
                continue
            if piece is None:
                if error is not None and not begun:
                    raise error
                return
            if isinstance(piece, ModelError):
                raise piece if begun or error is None else error
            begun = True
            yield piece


class _Timers:
    """Calls functions at given times, in one thread that is started when it is first needed."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add(self, at: float, action: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (at, next(self._numbers), action))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hedge timers", daemon=True)
                self._thread.start()
            if self._due[0][0] == at:
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._stopping and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._stopping:
                    return
                _, _, action = heapq.heappop(self._due)
            action()
