"""A circuit breaker: an endpoint that failed gets no calls until it is healthy, so that no call waits for it."""

import logging
import math
import threading
import time
from collections.abc import Callable

from llm_functionalities.errors import CircuitOpen, ModelError

logger = logging.getLogger(__name__)

LONGEST_EJECTION_SECONDS = 300.0

# Each period of this length without an ejection halves the duration of the next one.
FORGIVING_SECONDS = 30.0


class CircuitBreaker:
    """Allows calls to one endpoint while it is closed, and refuses them at once while it is open.

    It opens at once if no connection can be made, and after `tolerance` consecutive failures otherwise. While it is
    open, a thread calls `probe` every `interval` seconds, counted from start to start, so that slow failures do not
    delay the recovery. The first probe that succeeds closes the breaker. After `patience` seconds without a call the
    thread ends and closes the breaker, so that the next call tries the endpoint.

    An endpoint may report that it is healthy and still fail every request. So it is also ejected, as in Envoy's outlier
    detection: other endpoints should be preferred for `interval` seconds, and for twice as long after each failure that
    follows the last ejection. Then it is on probation until a request succeeds.

    `probe` returns if the endpoint is healthy and raises ModelError if it is not. It needs a time-out of its own.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], None],
        *,
        interval: float = 1.0,
        tolerance: int = 5,
        patience: float = 60.0,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """on_change: called by any thread after the breaker has opened or closed."""
        self._name = name
        self._probe = probe
        self._interval = interval
        self._tolerance = tolerance
        self._patience = patience
        self._on_change = on_change
        self._lock = threading.Lock()
        self._problem: ModelError | None = None
        self._failures = 0
        self._late = 0
        self._ejections = 0
        self._ejected_until = -math.inf
        self.on_probation = False
        self._opened_at = 0.0
        self._examined_at = -math.inf
        self._last_call_at = 0.0
        self._watch: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def closed(self) -> bool:
        return self._problem is None

    @property
    def ejected(self) -> bool:
        return time.monotonic() < self._ejected_until

    def check(self) -> None:
        """Raises CircuitOpen unless the breaker is closed."""
        self._last_call_at = time.monotonic()
        if (problem := self._problem) is not None:
            raise CircuitOpen(f"{self._name} is unavailable: {problem}")

    def succeeded(self) -> None:
        self._failures = self._late = 0
        self.on_probation = False
        if self._problem is not None:  # a call that was sent although the circuit was open
            with self._lock:
                self._close("back")

    def failed(self, problem: ModelError) -> None:
        """Counts a failed request to an endpoint that could be reached."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._tolerance or self.on_probation:
                self._eject()
                self._open(problem)

    def unreachable(self, problem: ModelError) -> None:
        """Opens the breaker because no connection could be made."""
        with self._lock:
            self._open(problem)

    def suspect(self) -> None:
        """Probes the endpoint once after a call missed its deadline: it may be down, or the time-out was short.

        At the `tolerance`-th missed deadline in a row the endpoint is ejected; calls to it are still allowed.
        """
        with self._lock:
            self._late += 1
            if self._late >= self._tolerance or self.on_probation:
                self._eject()
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

    def _eject(self) -> None:
        now = time.monotonic()
        if now < self._ejected_until:
            return  # the request was sent before the ejection
        forgiven = max(0, self._ejections - int(min(1e6, (now - self._ejected_until) / FORGIVING_SECONDS)))
        self._ejections = forgiven + 1
        seconds = min(LONGEST_EJECTION_SECONDS, self._interval * 2 ** min(forgiven, 20))
        self._ejected_until = now + seconds
        self.on_probation = True

    def _open(self, problem: ModelError) -> None:
        if self._problem is not None or self._stopping.is_set():
            return
        self._opened_at = self._last_call_at = time.monotonic()
        if self._watch is None and not self._start(self._watch_until_healthy):
            return  # nothing would close it again; the next failure will try once more
        self._problem = problem
        logger.warning("%s is unavailable: %s", self._name, problem, extra={"reason": problem.reason})
        self._on_change()

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
                if problem is None:
                    self._close("back")
                elif started - self._last_call_at > self._patience:
                    self._close("no calls for it lately; the next call will try it")
                if self._problem is None:
                    self._watch = None
                    return
                self._problem = problem

    def _close(self, news: str) -> None:
        if self._problem is None:
            return
        away = time.monotonic() - self._opened_at
        self._problem = None
        self._failures = 0
        logger.warning("%s is %s", self._name, news, extra={"away_seconds": round(away, 1)})
        self._on_change()

    def _problem_of_probe(self) -> ModelError | None:
        try:
            self._probe()
        except ModelError as error:
            return error
        return None
