"""A histogram that one thread writes, in place of prometheus_client's."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

_INFINITE = "+Inf"


class Buckets:
    """The observations of one combination of label values."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, amount: float) -> None:
        """Counts one observation."""
        self._sum += amount
        self._counts[bisect_left(self._bounds, amount)] += 1

    def read(self) -> tuple[list[int], float]:
        """Returns how many observations are at most each bound, and in all, and their sum."""
        return list(accumulate(self._counts)), self._sum


class Histogram(Collector):
    """Finds the bucket by bisection, without a lock: one thread observes, any thread may collect.

    prometheus_client's compares an amount with one bound after the other and takes two locks, several times a request.
    """

    def __init__(
        self, name: str, meaning: str, bounds: Sequence[float], label: str | None, registry: CollectorRegistry
    ) -> None:
        """bounds: the buckets' upper bounds, ascending, without infinity. label: name of its label; None: no label."""
        self._name, self._meaning, self._bounds, self._label = name, meaning, bounds, label
        self._names = [*map(floatToGoString, bounds), _INFINITE]
        self._children: dict[str, Buckets] = {} if label else {"": Buckets(bounds)}
        if not label:
            self.observe = self._children[""].observe
        registry.register(self)

    def labels(self, value: str) -> Buckets:
        """Returns the observations of one label value."""
        found = self._children.get(value)
        if found is None:
            found = self._children[value] = Buckets(self._bounds)
        return found

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._meaning, labels=[self._label] if self._label else [])
        for value, buckets in list(self._children.items()):
            counts, total = buckets.read()
            bounds = [(name, float(count)) for name, count in zip(self._names, counts, strict=True)]
            family.add_metric([value] if self._label else [], bounds, total)
        yield family
