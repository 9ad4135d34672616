"""The metrics for Prometheus: calls, empty responses by reason, latency, the endpoints' state; and their server."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from socket import AF_INET, AF_INET6, SHUT_RDWR, socket
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, make_wsgi_app
from prometheus_client.process_collector import ProcessCollector

from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.model.pool import FairPool

logger = logging.getLogger(__name__)

# Maximum number of connections for metrics, each with a thread. Further ones are closed at once.
MOST_SCRAPES = 8
# Maximum seconds of a connection for metrics.
SCRAPE_SECONDS = 5.0

LATENCY_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40)


class ServiceMetrics:
    """The service's metrics, in a separate registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.calls = Counter(
            "llm_functionalities_calls",
            "Completed calls, by method and status.",
            ["method", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "llm_functionalities_call_seconds",
            "Duration of calls.",
            ["method"],
            buckets=LATENCY_SECONDS,
            registry=self.registry,
        )
        self._running = Gauge("llm_functionalities_calls_running", "Calls in progress.", registry=self.registry)
        self.empties = Counter(
            "llm_functionalities_empty_answers", "Empty answers, by reason.", ["reason"], registry=self.registry
        )
        self.hedges = Counter(
            "llm_functionalities_hedges",
            "Hedged requests, by outcome: won, lost, failed, or no_budget (not sent).",
            ["outcome"],
            registry=self.registry,
        )
        self.fallbacks = Counter(
            "llm_functionalities_fallbacks",
            "Requests sent to the fallback endpoint because no other endpoint accepted them.",
            registry=self.registry,
        )
        self.ladder_requests = Counter(
            "llm_functionalities_ladder_requests",
            "Requests to a model of a ladder, by why it was asked: chosen, fallback (another one failed or refused), "
            "late (another one was about to be).",
            ["model", "reason"],
            registry=self.registry,
        )
        self.ladder_answers = Counter(
            "llm_functionalities_ladder_answers",
            "Answers to calls that name several models, by the model that answered.",
            ["model"],
            registry=self.registry,
        )
        self._up = Gauge(
            "llm_functionalities_endpoint_up",
            "1 if the endpoint is available, 0 if its circuit breaker is open.",
            ["endpoint"],
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "llm_functionalities_endpoint_requests", "Requests in progress.", ["endpoint"], registry=self.registry
        )
        self._waiting = Gauge(
            "llm_functionalities_prompts_waiting", "Prompts waiting for a thread.", registry=self.registry
        )
        self.event_loop_lag = Histogram(
            "llm_functionalities_event_loop_lag_seconds",
            "Event-loop lag in seconds.",
            buckets=LATENCY_SECONDS,
            registry=self.registry,
        )
        ProcessCollector(registry=self.registry)

    def count_empty(self, reason: str) -> None:
        self.empties.labels(reason).inc()

    def count_hedge(self, outcome: str) -> None:
        self.hedges.labels(outcome).inc()

    def count_ladder_request(self, model: str, reason: str) -> None:
        self.ladder_requests.labels(model, reason).inc()

    def count_ladder_answer(self, model: str) -> None:
        self.ladder_answers.labels(model).inc()

    def watch_endpoint(self, endpoint: Endpoint) -> None:
        """Exports the endpoint's state and load from now on."""
        self._up.labels(endpoint.name).set_function(lambda: float(endpoint.breaker.closed))
        self._in_flight.labels(endpoint.name).set_function(lambda: endpoint.in_flight)

    def watch_calls(self, running: Callable[[], int]) -> None:
        self._running.set_function(running)

    def watch_pool(self, pool: FairPool) -> None:
        self._waiting.set_function(lambda: pool.waiting)

    def serve(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Serves the metrics over HTTP. Returns the port, and a function that stops serving.

        Raises OSError if the port is in use.
        """
        server = _MetricsServer((host, port))
        server.set_app(make_wsgi_app(self.registry))
        thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return server.server_port, stop


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Serves a few scrapes at a time, and ends scrapes that take long."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = AF_INET6 if ":" in address[0] else AF_INET
        self._begun: dict[socket, float] = {}
        self._lock = Lock()
        super().__init__(address, _QuietHandler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._begun) >= MOST_SCRAPES
            if not full:
                self._begun[request] = time.monotonic()
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._begun.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends connections that last too long. Called about twice a second."""
        with self._lock:
            for request, begun in self._begun.items():
                if time.monotonic() - begun > SCRAPE_SECONDS:
                    with suppress(OSError):
                        request.shutdown(SHUT_RDWR)  # its thread sees the end, and closes it

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a scrape of the metrics by %s failed", client_address, exc_info=True)


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002
        """Logs nothing, because metrics are requested often."""
