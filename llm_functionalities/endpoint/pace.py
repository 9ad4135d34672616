"""Measures how long a model takes for its answers, and predicts how long the next one will take.

A server computes the answers of a batch together, so an answer takes longer the more others are in progress. The time
is taken as a sum of terms that no answer makes smaller: a constant, the characters of the prompt, the tokens of the
answer, and both of these again for each other request that is in progress meanwhile. The factors are fitted to the last
answers (least squares of relative errors, none below zero), and the error of the last predictions says how far to trust
the next one.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

# Answers of a kind before its times are predicted.
ENOUGH_ANSWERS = 3

# The weight of an answer in the fit falls by this factor with each later one: about the last 50 count.
FORGETTING = 0.98

# Prediction errors and lengths that are kept, and limits of answers (`max_tokens`) for which lengths are.
RECENT, MOST_LIMITS = 16, 64

# Without any answer for so long, a prediction that fades is halved: the model may have become faster.
HALVED_SECONDS = 10.0

_SWEEPS = 60
_TERMS = 5


@dataclass(frozen=True)
class Work:
    """A request as its duration depends on it. kind: requests of different kinds are measured apart."""

    kind: str
    characters: int
    max_tokens: int = 0


class Running:
    """A request in progress. alone: predicted seconds with no other one; predicted: with those that there are."""

    def __init__(self, work: Work, begun: float, others: float, alone: float, predicted: float | None) -> None:
        self.work = work
        self.begun = begun
        self.others = others  # area below the number of other requests, until the request begins; then until it ends
        self.alone = alone
        self.predicted = predicted


class ModelPace:
    """The pace of one model, measured by the requests that this service sends it. Used from many threads."""

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
        """Returns the seconds within which a request that begins now ends, in `quantile` (0 to 1) of all cases.

        None: there have been too few answers; `inf`: so there have, but enough are in progress. more: other requests
        that are expected to begin as well. fades: the longer the model has been idle, the shorter the time.
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
        """Notes that a request was sent. `ended` is to be called with what this returns."""
        with self._lock:
            now = self._clock()
            alone, predicted = self._predicted(work, now)
            self._count(now)
            running = Running(work, now, self._area, alone, predicted)
            self._running.add(running)
            return running

    def ended(self, running: Running, tokens: int | None, *, failed: bool = False) -> None:
        """Notes that a request has ended. tokens: of its answer, 0 if not known; None: it was cancelled before its end.

        A cancelled one counts if it took longer than predicted: its answer would have come later still. One that
        failed does not count.
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
        """Returns the mean seconds of a request alone and beside those in progress; 0 and None if not known.

        Those that end before it slow it for a part of its time only.
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
    """The factors of one kind of requests, from the last answers."""

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
        """Returns the ratio of a duration to its prediction that `quantile` of the last ones did not exceed."""
        errors = sorted(self._errors)
        return errors[min(len(errors) - 1, int(quantile * len(errors)))] if errors else 1.0

    def add_length(self, max_tokens: int, tokens: int) -> None:
        self._lengths.setdefault(max_tokens, deque(maxlen=RECENT)).append(tokens)
        self._lengths.move_to_end(max_tokens)
        if len(self._lengths) > MOST_LIMITS:
            self._lengths.popitem(last=False)

    def length(self, max_tokens: int) -> float:
        """Returns the mean number of tokens of the last answers with this limit; the limit if there is none."""
        lengths = self._lengths.get(max_tokens)
        return sum(lengths) / len(lengths) if lengths else float(max_tokens)


def _terms(characters: int, tokens: float, others: float) -> tuple[float, ...]:
    return 1.0, float(characters), float(tokens), others * characters, others * tokens
