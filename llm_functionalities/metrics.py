"""What Prometheus is told: calls, empty answers by reason, latency, and the endpoints' state."""

from collections.abc import Callable
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.process_collector import ProcessCollector

from llm_functionalities.endpoint import Endpoint
from llm_functionalities.pool import FairPool

LATENCY_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40)


class Metrics:
    """The service's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "llm_functionalities_calls", "Calls that ended.", ["method", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "llm_functionalities_call_seconds",
            "How long calls took.",
            ["method"],
            buckets=LATENCY_SECONDS,
            registry=self.registry,
        )
        self.running = Gauge("llm_functionalities_calls_running", "Calls under way.", registry=self.registry)
        self.empties = Counter(
            "llm_functionalities_empty_answers", "Empty answers.", ["reason"], registry=self.registry
        )
        self._up = Gauge(
            "llm_functionalities_endpoint_up", "1 unless the endpoint is away.", ["endpoint"], registry=self.registry
        )
        self._in_flight = Gauge(
            "llm_functionalities_endpoint_requests", "Requests under way.", ["endpoint"], registry=self.registry
        )
        self._waiting = Gauge(
            "llm_functionalities_prompts_waiting", "Prompts that wait for a thread.", registry=self.registry
        )
        self.event_loop_lag = Histogram(
            "llm_functionalities_event_loop_lag_seconds",
            "How late the event loop came to what was due.",
            buckets=LATENCY_SECONDS,
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)

    def count_empty(self, reason: str) -> None:
        self.empties.labels(reason).inc()

    def watch_endpoint(self, endpoint: Endpoint) -> None:
        """Shows the endpoint's state from now on."""
        self._up.labels(endpoint.name).set_function(lambda: float(endpoint.breaker.closed))
        self._in_flight.labels(endpoint.name).set_function(lambda: endpoint.in_flight)

    def watch_pool(self, pool: FairPool) -> None:
        self._waiting.set_function(lambda: pool.waiting)

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Serves them over HTTP. Returns the port and what stops it. Raises OSError when the port is in use."""
        server: WSGIServer
        thread: Thread
        server, thread = start_http_server(port, addr=host, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop
