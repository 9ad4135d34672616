"""A circuit breaker: an endpoint that failed is left alone until it is healthy, so that no call waits for it."""

import logging
import math
import threading
import time
from collections.abc import Callable

from llm_functionalities.errors import CircuitOpen, ModelError

logger = logging.getLogger(__name__)


class CircuitBreaker:
    """Lets the calls to one endpoint through while it is closed, and refuses them without a wait while it is open.

    It opens at once when no connection can be made, and after `tolerance` failures in a row otherwise. While it is
    open, a thread calls `probe` every `interval` seconds, counted from start to start so that slow failures do not
    delay the recovery. The first probe that succeeds closes the breaker. After `patience` seconds without a call the
    thread ends and leaves the breaker closed, so that the next call finds out.

    `probe` returns when the endpoint is healthy and raises ModelError when it is not. It has to bound its own time.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], None],
        *,
        interval: float = 1.0,
        tolerance: int = 5,
        patience: float = 60.0,
    ) -> None:
        self._name = name
        self._probe = probe
        self._interval = interval
        self._tolerance = tolerance
        self._patience = patience
        self._lock = threading.Lock()
        self._problem: ModelError | None = None
        self._failures = 0
        self._opened_at = 0.0
        self._examined_at = -math.inf
        self._last_call_at = 0.0
        self._watch: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def closed(self) -> bool:
        return self._problem is None

    def check(self) -> None:
        """Raises CircuitOpen unless the breaker is closed."""
        self._last_call_at = time.monotonic()
        if (problem := self._problem) is not None:
            raise CircuitOpen(f"{self._name} is away: {problem}")

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, problem: ModelError) -> None:
        """Counts a request that the endpoint took and did not answer."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._tolerance:
                self._open(problem)

    def unreachable(self, problem: ModelError) -> None:
        """Opens the breaker because no connection could be made."""
        with self._lock:
            self._open(problem)

    def suspect(self) -> None:
        """Probes the endpoint once because a call's time was up: the endpoint may be down, or the caller in a hurry."""
        with self._lock:
            is_due = time.monotonic() - self._examined_at > self._interval
            if is_due and self._problem is None and self._watch is None and not self._stopping.is_set():
                self._examined_at = time.monotonic()
                self._start(self._examine)

    def stop(self, timeout: float) -> None:
        """Ends the thread that probes. Waits for it for at most `timeout` seconds."""
        self._stopping.set()
        with self._lock:
            watch = self._watch
        if watch is not None:
            watch.join(timeout)

    def _open(self, problem: ModelError) -> None:
        if self._problem is not None or self._stopping.is_set():
            return
        self._opened_at = self._last_call_at = time.monotonic()
        if self._watch is None and not self._start(self._watch_until_healthy):
            return  # nothing would close it again; the next failure will try once more
        self._problem = problem
        logger.warning("%s is away: %s", self._name, problem, extra={"reason": problem.reason})

    def _start(self, work: Callable[[], None]) -> bool:
        """Starts the thread that probes. Returns False if the system allows no more threads at the moment."""
        watch = threading.Thread(target=work, name=f"watch {self._name}", daemon=True)
        try:
            watch.start()
        except RuntimeError:
            return False
        self._watch = watch
        return True

    def _examine(self) -> None:
        problem = self._problem_of_probe()
        with self._lock:
            if problem is not None:
                self._open(problem)
            if self._problem is None:
                self._watch = None
                return
        self._watch_until_healthy()

    def _watch_until_healthy(self) -> None:
        started = self._opened_at
        while not self._stopping.wait(max(0.0, started + self._interval - time.monotonic())):
            started = time.monotonic()
            problem = self._problem_of_probe()
            with self._lock:
                forgotten = started - self._last_call_at > self._patience
                if problem is None or forgotten:
                    self._close("back" if problem is None else "not asked for any more; the next call will try it")
                    return
                self._problem = problem

    def _close(self, news: str) -> None:
        away = time.monotonic() - self._opened_at
        self._problem = None
        self._failures = 0
        self._watch = None
        logger.warning("%s is %s", self._name, news, extra={"away_seconds": round(away, 1)})

    def _problem_of_probe(self) -> ModelError | None:
        try:
            self._probe()
        except ModelError as error:
            return error
        return None
