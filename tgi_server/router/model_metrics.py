"""Metrics of a server of several models: their states, and all metrics of each model in one collector."""

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from tgi_server.router.metrics import Metrics

_LABEL = "model"
# Metrics of the process, which are not of one model.
_OF_THE_PROCESS = ("process_", "tgi_event_loop_lag", "tgi_connections_", "tgi_client_memory", "tgi_requests_refused")
_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)


class ModelMetrics:
    """Counts what happens to each of several models."""

    def __init__(self, names: Sequence[str]) -> None:
        self.registry = CollectorRegistry()
        labels = (_LABEL,)
        self._awake = Gauge("tgi_model_awake", "1 if the model is awake, else 0.", labels, registry=self.registry)
        self._failed = Counter(
            "tgi_model_failures",
            "Number of times the model could not be loaded or woken, or lost its shards.",
            labels,
            registry=self.registry,
        )
        self._loaded = Histogram(
            "tgi_model_load_duration",
            "Time to load the model, from the start of its shards.",
            labels,
            buckets=_SECONDS,
            registry=self.registry,
        )
        for name in names:  # shown from the start
            for metric in (self._awake, self._failed, self._loaded):
                metric.labels(name)

    def awake(self, model: str, *, awake: bool) -> None:
        self._awake.labels(model).set(awake)

    def failed(self, model: str) -> None:
        self._failed.labels(model).inc()

    def loaded(self, model: str, seconds: float) -> None:
        self._loaded.labels(model).observe(seconds)


class SeveralMetrics(Collector):
    """The metrics of all models as one collector: each series has the label `model`, but for those of the process."""

    def __init__(self, models: Mapping[str, Metrics], residency: ModelMetrics) -> None:
        self._models = models
        self._residency = residency

    def collect(self) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for number, (name, metrics) in enumerate(self._models.items()):
            for metric in metrics.described():
                shared = metric.name.startswith(_OF_THE_PROCESS)
                if shared and number > 0:
                    continue
                if metric.name not in merged:
                    merged[metric.name] = Metric(metric.name, metric.documentation, metric.type, metric.unit)
                merged[metric.name].samples += (
                    metric.samples
                    if shared
                    else [sample._replace(labels={_LABEL: name} | sample.labels) for sample in metric.samples]
                )
        yield from merged.values()
        yield from self._residency.registry.collect()
