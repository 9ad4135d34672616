"""Measures the time that a model needs for its answers, and predicts the time of the next one.

A server computes the answers of a batch together, so an answer takes longer if others are in progress. The prediction
is a sum of five terms: a constant, the characters of the prompt, the tokens of the answer, and the last two again times
the mean number of concurrent requests. The factors are fitted to the latest answers (non-negative least squares of
relative errors). Quantiles of the latest prediction errors give the time that is exceeded with a given probability.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

# Number of answers of a kind before its times are predicted.
ENOUGH_ANSWERS = 3

# The weight of an answer in the fit is multiplied by this factor with each later answer: about the last 50 count.
FORGETTING = 0.98

# Number of latest prediction errors and answer lengths, and of values of `max_tokens` with separate lengths.
RECENT, MOST_LIMITS = 16, 64

# Half-life of a fading prediction while there are no answers: the model may have become faster.
HALVED_SECONDS = 10.0

_SWEEPS = 60
_TERMS = 5


@dataclass(frozen=True)
class Work:
    """The properties of a request that determine its duration. kind: each kind of request is measured separately."""

    kind: str
    characters: int
    max_tokens: int = 0


class Running:
    """A request in progress. alone: predicted seconds without other requests; predicted: with the concurrent ones."""

    def __init__(self, work: Work, begun: float, others: float, alone: float, predicted: float | None) -> None:
        self.work = work
        self.begun = begun
        self.others = others  # integral of the number of requests over time, at the beginning of this one
        self.alone = alone
        self.predicted = predicted


class ModelPace:
    """Measured times of one model, from the requests that this service sends to it. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: returns seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, _Fit] = {}
        self._running: set[Running] = set()
        self._area, self._area_at = 0.0, clock()

    @property
    def in_progress(self) -> int:
        return len(self._running)

    def seconds(self, work: Work, quantile: float, more: int = 0, *, fades: bool = False) -> float | None:
        """Returns the predicted seconds of a request that begins now, for a probability of `quantile` (0 to 1).

        None: there have been too few answers for a prediction; `inf`: the same, but enough requests are in progress.
        more: number of further requests that will begin at the same time. fades: True if the prediction decays while
        the model is idle.
        """
        with self._lock:
            now = self._clock()
            fit = self._kinds.get(work.kind)
            predicted = self._predicted(work, now, more)[1]
            if fit is None or predicted is None:
                return None if len(self._running) < ENOUGH_ANSWERS else inf
            idle = now - fit.observed_at if fades and not self._running else 0.0
            return predicted * fit.error(quantile) * 0.5 ** (idle / HALVED_SECONDS)

    def began(self, work: Work) -> Running:
        """Reports that a request was sent. `ended` must be called with the returned object."""
        with self._lock:
            now = self._clock()
            alone, predicted = self._predicted(work, now)
            self._count(now)
            running = Running(work, now, self._area, alone, predicted)
            self._running.add(running)
            return running

    def ended(self, running: Running, tokens: int | None, *, failed: bool = False) -> None:
        """Reports that a request has ended. tokens: length of its answer, 0 if not known; None: it was cancelled.

        A cancelled request counts if it took longer than predicted, because its answer would have come even later. A
        failed one does not count.
        """
        with self._lock:
            now = self._clock()
            self._count(now)
            self._running.discard(running)
            work, took = running.work, now - running.begun
            early = running.predicted is not None and took <= running.predicted
            if failed or took <= 0 or (tokens is None and early):
                return
            fit = self._kinds.setdefault(work.kind, _Fit())
            fit.observed_at = now
            if running.predicted is not None:
                fit.add_error(took / running.predicted)
            others = (self._area - running.others) / took - 1
            if tokens is None:
                tokens = round(fit.length(work.max_tokens))
            elif tokens and work.max_tokens:
                fit.add_length(work.max_tokens, tokens)
            fit.add(_terms(work.characters, tokens or round(fit.length(work.max_tokens)), others), took)

    def _count(self, now: float) -> None:
        self._area += len(self._running) * (now - self._area_at)
        self._area_at = now

    def _predicted(self, work: Work, now: float, more: int = 0) -> tuple[float, float | None]:
        """Returns the predicted seconds of a request alone, and with those in progress; 0 and None if not known.

        A request in progress counts with the share of the time for which it will overlap.
        """
        fit = self._kinds.get(work.kind)
        if fit is None or fit.count < ENOUGH_ANSWERS:
            return 0.0, None
        tokens = fit.length(work.max_tokens)
        alone = fit.predict(_terms(work.characters, tokens, 0.0))
        others = float(more)
        for each in self._running:
            left = each.alone * max(0.0, 1 - (now - each.begun) / each.predicted) if each.predicted else alone
            others += min(1.0, left / alone) if alone > 0 else 1.0
        return alone, fit.predict(_terms(work.characters, tokens, others))


class _Fit:
    """The fitted factors for one kind of request."""

    def __init__(self) -> None:
        self.count = 0
        self.observed_at = 0.0
        self._products = [[0.0] * _TERMS for _ in range(_TERMS)]
        self._sums = [0.0] * _TERMS
        self._factors = [0.0] * _TERMS
        self._errors: deque[float] = deque(maxlen=RECENT)
        self._lengths: OrderedDict[int, deque[int]] = OrderedDict()

    def add(self, terms: Sequence[float], seconds: float) -> None:
        self.count += 1
        weight = 1 / seconds**2
        for row, (products, term) in enumerate(zip(self._products, terms, strict=True)):
            for column, other in enumerate(terms):
                products[column] = FORGETTING * products[column] + weight * term * other
            self._sums[row] = FORGETTING * self._sums[row] + weight * term * seconds
        for _ in range(_SWEEPS):
            for row, products in enumerate(self._products):
                if products[row] > 0:
                    rest = sum(map(float.__mul__, products, self._factors)) - products[row] * self._factors[row]
                    self._factors[row] = max(0.0, (self._sums[row] - rest) / products[row])

    def predict(self, terms: Sequence[float]) -> float:
        return sum(map(float.__mul__, self._factors, terms))

    def add_error(self, ratio: float) -> None:
        self._errors.append(ratio)

    def error(self, quantile: float) -> float:
        """Returns the quantile of the latest ratios of durations to predictions."""
        errors = sorted(self._errors)
        return errors[min(len(errors) - 1, int(quantile * len(errors)))] if errors else 1.0

    def add_length(self, max_tokens: int, tokens: int) -> None:
        self._lengths.setdefault(max_tokens, deque(maxlen=RECENT)).append(tokens)
        self._lengths.move_to_end(max_tokens)
        if len(self._lengths) > MOST_LIMITS:
            self._lengths.popitem(last=False)

    def length(self, max_tokens: int) -> float:
        """Returns the mean number of tokens of the latest answers with this limit; the limit if there are none."""
        lengths = self._lengths.get(max_tokens)
        return sum(lengths) / len(lengths) if lengths else float(max_tokens)


def _terms(characters: int, tokens: float, others: float) -> tuple[float, ...]:
    return 1.0, float(characters), float(tokens), others * characters, others * tokens
