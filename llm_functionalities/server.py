"""Builds the gRPC server from settings, starts it, and stops it."""

import asyncio
import logging
import resource
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from llm_functionalities.endpoint.address import Address, parse_name_server
from llm_functionalities.endpoint.balancer import Balancer
from llm_functionalities.endpoint.endpoint import Endpoint
from llm_functionalities.endpoint.hedging import Hedging
from llm_functionalities.endpoint.ladder import LadderModel, Ladders
from llm_functionalities.endpoint.resolver import Resolver
from llm_functionalities.endpoint.transport import BoundedBackend, BoundedTransport, install
from llm_functionalities.errors import CannotStart
from llm_functionalities.metrics import ServiceMetrics
from llm_functionalities.model.empty_responses import EmptyResponses
from llm_functionalities.model.model import Model
from llm_functionalities.model.pool import FairPool
from llm_functionalities.services.admission import CallAdmission
from llm_functionalities.services.context import ModelClient
from llm_functionalities.services.numbers import LLMDecisions, LLMEmbeddings
from llm_functionalities.services.prefix_cache import LLMPrefixCache
from llm_functionalities.services.runner import LLMRunner
from llm_functionalities.services.workflows.table import add_workflows
from llm_functionalities.settings import Settings
from shared.event_loop import watch_event_loop
from shared.stubs import llm_pb2, llm_pb2_grpc

logger = logging.getLogger(__name__)

SERVICES = tuple(service.full_name for service in llm_pb2.DESCRIPTOR.services_by_name.values())

# The health of an unavailable endpoint is checked every `retry_after` seconds; a check takes up to this long.
UNCERTAIN_SECONDS = 2.0

# Each connection gets this fraction of all streams, but at least as many as RFC 9113 (6.5.2) recommends.
CONNECTIONS_OF_ALL = 8
LEAST_STREAMS = 100

# When more calls than this wait, gRPC cancels some of them, whoever sent them. The limit is so high that a caller who
# only resets streams does not cause the calls of others to be cancelled.
MOST_PENDING = 20_000

# Calls that a connection may begin before the other connections get their turn.
REQUESTS_PER_READ = 8

# The name in the health service that says if there is a model server.
READINESS = "readiness"

# The threads get this long to end after the last call has ended.
STOP_SECONDS = 2.0

# Open files besides the connections of callers and those to model servers.
OTHER_FILES = 128

# Bytes of a call's metadata.
LONGEST_METADATA = 16 * 1024

# A connection without a call is closed after this time. gRPC clients make another by themselves when they need one.
IDLE_SECONDS = 5 * 60

# After this time clients make a new connection for new calls, so that stuck connections end and load is spread again.
CONNECTION_SECONDS = 10 * 60


class Server:
    """The service in one process. It connects to no model server before the first call needs one."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._metrics = ServiceMetrics()
        self._http = install(_transport(settings))
        self._balancer = Balancer(
            [self._endpoint(url) for url in settings.inference_endpoint_url],
            uncertain_seconds=settings.retry_after + UNCERTAIN_SECONDS,
            hedging=self._hedging(),
            fallback=self._endpoint(settings.fallback_endpoint) if settings.fallback_endpoint else None,
            count_fallback=self._metrics.fallbacks.inc,
        )
        self._models = self._ladder_models()
        self._ladders = Ladders(
            self._models,
            Hedging(None, budget=None, threads=settings.threads, count=lambda _: None),
            self._metrics.count_ladder_request,
            self._metrics.count_ladder_answer,
        )
        self._pool = FairPool(settings.threads, settings.batch_threads or settings.threads)
        self._metrics.watch_pool(self._pool)
        self._health = health.aio.HealthServicer()
        self._stop_metrics: Callable[[], None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server = self._grpc_server()

    async def start(self) -> int:
        """Listens for calls. Returns the port. Raises CannotStart, which says what to change."""
        settings = self._settings
        _allow_open_files(settings.max_connections + settings.threads + OTHER_FILES)
        if settings.metrics_port is not None:
            port, self._stop_metrics = self._serve_metrics(settings.metrics_port)
            logger.info("metrics on http://%s:%d/metrics", settings.listen_address, port)
        address = f"{settings.listen_address}:{settings.port}"
        try:
            if settings.tls_cert is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _server_credentials(settings))
        except RuntimeError:
            raise CannotStart(
                f"cannot listen on {address}: the port is in use, or the address does not belong to this machine; "
                "choose others with --port and --listen-address"
            ) from None
        await self._server.start()
        self._watch = asyncio.create_task(watch_event_loop(self._metrics.event_loop_lag.observe))
        for name in ("", *SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._loop = asyncio.get_running_loop()
        await self._tell_readiness()
        if not (settings.inference_endpoint_url or settings.fallback_endpoint or settings.ladder_models):
            logger.warning(
                "no endpoint is set, so every answer will be empty; set INFERENCE_ENDPOINT_URL or --endpoint"
            )
        return port

    async def stop(self) -> None:
        """Refuses new calls, lets the running ones end within the grace time, and closes all threads and sockets."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(self._settings.grace)
        # Waits in a thread, because the event loop has to end the calls on which the workers still work.
        await asyncio.to_thread(self._pool.stop, STOP_SECONDS)
        await asyncio.to_thread(self._balancer.stop, STOP_SECONDS)
        await asyncio.to_thread(self._ladders.stop, STOP_SECONDS)
        if self._watch is not None:
            self._watch.cancel()
        self._http.close()
        if self._stop_metrics is not None:
            self._stop_metrics()

    async def _tell_readiness(self) -> None:
        serving = health_pb2.HealthCheckResponse
        ready = self._balancer.ready or self._ladders.ready
        await self._health.set(READINESS, serving.SERVING if ready else serving.NOT_SERVING)

    def _readiness_may_have_changed(self) -> None:
        """Called by any thread."""
        if self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._tell_readiness(), self._loop)

    def _ladder_models(self) -> dict[str, LadderModel]:
        """Returns the models of --ladder-models by their names."""
        endpoints: dict[str, list[Endpoint]] = {}
        for text in self._settings.ladder_models:
            name, _, place = text.partition("=")
            url, _, model = place.partition("#")
            endpoints.setdefault(name, []).append(self._endpoint(url, model))
        seconds = self._settings.retry_after + UNCERTAIN_SECONDS
        return {
            name: LadderModel(name, Balancer(each, uncertain_seconds=seconds, hedging=self._hedging()))
            for name, each in endpoints.items()
        }

    def _endpoint(self, url: str, model: str = "") -> Endpoint:
        settings = self._settings
        endpoint = Endpoint(
            Address.parse(url),
            self._http,
            settings.endpoint_token,
            model=model,
            interval=settings.retry_after,
            tolerance=settings.failures_tolerated,
            on_change=self._readiness_may_have_changed,
        )
        self._metrics.watch_endpoint(endpoint)
        return endpoint

    def _hedging(self) -> Hedging | None:
        after = self._settings.hedge_after_ms
        if after is None:
            return None
        return Hedging(
            None if after == "p95" else float(after) / 1000,
            budget=self._settings.hedge_budget,
            threads=self._settings.threads,
            count=self._metrics.count_hedge,
        )

    def _grpc_server(self) -> Any:
        settings = self._settings
        admission = CallAdmission(
            settings.max_concurrent_calls,
            self._metrics,
            max_entries=settings.max_batch_prompts,
            receive_timeout=settings.receive_timeout,
            models=list(self._models),
            ladder=settings.ladder,
        )
        server = grpc.aio.server(
            interceptors=[admission],
            options=_options(settings, admission.max_rpcs),
            maximum_concurrent_rpcs=admission.max_rpcs,
        )
        model = Model(self._balancer, self._pool, EmptyResponses(self._metrics.count_empty), self._ladders)
        client = ModelClient(model, settings.default_timeout, settings.max_timeout, settings.max_tokens)
        llm_pb2_grpc.add_LLMRunnerServicer_to_server(LLMRunner(client, settings.prompt_echo), server)
        llm_pb2_grpc.add_LLMDecisionsServicer_to_server(LLMDecisions(client), server)
        llm_pb2_grpc.add_LLMEmbeddingsServicer_to_server(LLMEmbeddings(client), server)
        llm_pb2_grpc.add_LLMPrefixCacheServicer_to_server(LLMPrefixCache(client), server)
        add_workflows(client, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection([*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        return server

    def _serve_metrics(self, port: int) -> tuple[int, Callable[[], None]]:
        try:
            return self._metrics.serve(self._settings.listen_address.strip("[]"), port)
        except OSError as error:
            raise CannotStart(f"cannot serve metrics on port {port}: {error.strerror}; see --metrics-port") from None


def _allow_open_files(needed: int) -> None:
    """Allows this process to have `needed` files open. Raises CannotStart when the system forbids that."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < needed:
        raise CannotStart(
            f"this process may have {most} files open and needs {needed}: "
            "allow more (ulimit -n), or take fewer with --max-connections and --threads"
        )
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, most))


def _transport(settings: Settings) -> BoundedTransport:
    servers = [parse_name_server(text) for text in settings.name_servers] or None
    backend = BoundedBackend(
        Resolver(settings.resolve_timeout, servers=servers), settings.connect_timeout, settings.connect_attempts
    )
    return BoundedTransport(backend, _trust("--endpoint-ca", settings.endpoint_ca), settings.max_message_bytes)


def _trust(flag: str, authorities: Path | None) -> ssl.SSLContext:
    """Returns a context that trusts the certificates of a file; None: the system's. Raises CannotStart."""
    try:
        return ssl.create_default_context(cafile=authorities)
    except OSError as error:  # SSLError among them
        raise CannotStart(f"{flag} {authorities} holds no certificate: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)


def _options(settings: Settings, max_streams: int) -> Sequence[tuple[str, int]]:
    """Returns the options of https://grpc.github.io/grpc/core/group__grpc__arg__keys.html."""
    return (
        ("grpc.so_reuseport", 0),  # a port in use is an error, not a share of its calls
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_metadata_size", LONGEST_METADATA),
        ("grpc.max_concurrent_streams", max(LEAST_STREAMS, max_streams // CONNECTIONS_OF_ALL)),  # of one connection
        ("grpc.server.max_pending_requests", MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
        ("grpc.http2.max_requests_per_read", REQUESTS_PER_READ),
        ("grpc.max_allowed_incoming_connections", settings.max_connections),
        ("grpc.server_handshake_timeout_ms", int(settings.receive_timeout * 1000)),
        ("grpc.max_connection_idle_ms", IDLE_SECONDS * 1000),
        ("grpc.max_connection_age_ms", CONNECTION_SECONDS * 1000),
        ("grpc.max_connection_age_grace_ms", int((settings.max_timeout + settings.receive_timeout) * 1000)),
        ("grpc.keepalive_time_ms", int(settings.keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),  # callers may ping this often, too
    )


def _server_credentials(settings: Settings) -> grpc.ServerCredentials:
    """Raises CannotStart when the files hold no certificates, or no key that fits."""
    assert settings.tls_key is not None
    assert settings.tls_cert is not None
    client_ca = settings.tls_client_ca
    # gRPC only says that it cannot listen.
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert, settings.tls_key, password="")
    except OSError as error:  # SSLError among them
        files = f"--tls-cert {settings.tls_cert} and --tls-key {settings.tls_key}"
        raise CannotStart(f"{files} are not a certificate and its key: {_reason(error)}") from None
    if client_ca is not None:
        _trust("--tls-client-ca", client_ca)
    return grpc.ssl_server_credentials(
        [(settings.tls_key.read_bytes(), settings.tls_cert.read_bytes())],
        root_certificates=client_ca.read_bytes() if client_ca else None,
        require_client_auth=client_ca is not None,
    )
