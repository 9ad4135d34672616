"""A circuit breaker: what failed is left alone until it is seen healthy, so that nobody waits for it."""

import logging
import math
import threading
import time
from collections.abc import Callable

from llm_functionalities.errors import CircuitOpen, ModelError

logger = logging.getLogger(__name__)


class Breaker:
    """Stands before one endpoint.

    Closed, it lets calls through. It opens at once when no connection can be made, and after `tolerance` failures in
    a row otherwise. While it is open every call is refused without a wait, and a watch of its own runs `probe` every
    `interval` seconds (from start to start, so that slow failures do not delay the recovery). The first probe that
    succeeds closes it. The watch gives up after `patience` seconds without a call and leaves the breaker closed, for
    the next call to find out.

    `probe` returns when the endpoint is healthy, raises ModelError when it is not, and is expected to bound itself.
    """

    def __init__(
        self,
        name: str,
        probe: Callable[[], None],
        *,
        interval: float = 1.0,
        tolerance: int = 5,
        patience: float = 60.0,
        on_change: Callable[[bool], None] = lambda healthy: None,
    ) -> None:
        self._name = name
        self._probe = probe
        self._interval = interval
        self._tolerance = tolerance
        self._patience = patience
        self._on_change = on_change
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
        """Raises CircuitOpen unless closed."""
        self._last_call_at = time.monotonic()
        if (problem := self._problem) is not None:
            raise CircuitOpen(f"{self._name} is away: {problem}")

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, problem: ModelError) -> None:
        """The endpoint took a request and did not answer it."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._tolerance:
                self._open(problem)

    def unreachable(self, problem: ModelError) -> None:
        """No connection could be made."""
        with self._lock:
            self._open(problem)

    def suspect(self) -> None:
        """A call's time was up. Whether the endpoint or the caller's haste is to blame, one probe tells."""
        with self._lock:
            rested = time.monotonic() - self._examined_at > self._interval
            if rested and self._problem is None and self._watch is None and not self._stopping.is_set():
                self._examined_at = time.monotonic()
                self._start(self._examine)

    def stop(self, timeout: float) -> None:
        """Ends the watch within `timeout` seconds, unless a probe lasts longer."""
        self._stopping.set()
        with self._lock:
            watch = self._watch
        if watch is not None:
            watch.join(timeout)

    def _open(self, problem: ModelError) -> None:
        if self._problem is not None or self._stopping.is_set():
            return
        self._problem = problem
        self._opened_at = self._last_call_at = time.monotonic()
        logger.warning("%s is away: %s", self._name, problem, extra={"reason": problem.reason})
        self._on_change(False)
        if self._watch is None:
            self._start(self._watch_until_healthy)

    def _start(self, work: Callable[[], None]) -> None:
        self._watch = threading.Thread(target=work, name=f"watch {self._name}", daemon=True)
        self._watch.start()

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
        self._on_change(True)

    def _problem_of_probe(self) -> ModelError | None:
        try:
            self._probe()
        except ModelError as error:
            return error
        return None
