"""Serving HTTP, and a graceful end."""

import asyncio
import ipaddress
import logging
import math
import socket
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from shared.stop_signals import ignore_stop_signals, on_stop_signal
from tgi_server.router.api.access import AccessRules
from tgi_server.router.app import create_app
from tgi_server.router.assembly import assembled
from tgi_server.router.connection import ClientConnection, bound_silence
from tgi_server.router.connections import Acceptor, Connections, connection_limits
from tgi_server.router.errors import StartupError
from tgi_server.router.metrics import CONTENT_TYPE, Metrics
from tgi_server.router.settings import RouterSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_METRICS_GRACE_SECONDS = 1
_METRICS_CONNECTIONS = 32


async def run(settings: RouterSettings) -> None:
    """Serves until SIGTERM or SIGINT, then lets running requests finish. Raises StartupError.

    A signal before the server is ready ends it at once: the task is cancelled.
    """
    task = asyncio.current_task()
    assert task is not None
    on_stop_signal(task.cancel)
    limits = connection_limits(settings.max_connections, settings.max_connections_per_address)
    listener = _listen(settings.hostname, settings.port, "--port")
    metrics_listener = None
    if settings.prometheus_port:
        metrics_listener = _listen(settings.hostname, settings.prometheus_port, "--prometheus-port")
    async with assembled(settings) as service:
        app: ASGIApp = create_app(service, access_rules(settings, listener))
        patience = settings.client_timeout
        servers = {HttpServer(app, settings.graceful_termination_timeout, patience, Connections(*limits)): listener}
        if metrics_listener is not None:
            scrapers = Connections(_METRICS_CONNECTIONS, _METRICS_CONNECTIONS)
            app = _metrics_app(service.metrics)
            servers[HttpServer(app, _METRICS_GRACE_SECONDS, patience, scrapers)] = metrics_listener
        on_stop_signal(lambda: _drain(servers))
        logger.info("ready on http://%s:%d", settings.hostname, listener.getsockname()[1])
        await asyncio.gather(*(server.serve([each]) for server, each in servers.items()))
    ignore_stop_signals()
    logger.info("stopped")


class HttpServer(uvicorn.Server):
    """Serves `app`; its end is asked for with `should_exit`, after which requests have `grace` seconds left.

    patience: seconds that a client may take to send a request, and to take what is sent. connections: how many may be.
    """

    def __init__(self, app: ASGIApp, grace: float, patience: int, connections: Connections) -> None:
        self.open_connections = connections
        config = uvicorn.Config(
            app,
            loop="none",
            http=ClientConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=patience,
            timeout_graceful_shutdown=math.ceil(grace),
        )
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        bound_silence(sockets or (), self.config.timeout_keep_alive)
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def connection() -> ClientConnection:
            return ClientConnection(self.config, self.server_state, app_state={})

        acceptors = [Acceptor(each, _BACKLOG, connection, self.open_connections) for each in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment]  # they are closed in the same way
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        self.open_connections.shed()
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are for all servers of the process together."""
        yield


def access_rules(settings: RouterSettings, listener: socket.socket) -> AccessRules:
    """Returns who may call the server that listens there."""
    loopback = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    hosts = {settings.hostname.lower(), *settings.allowed_hosts} if loopback else None
    return AccessRules(settings.api_keys, settings.cors_allow_origin, hosts)


def _drain(servers: Iterable[uvicorn.Server]) -> None:
    """Has the servers take no more, and finish what runs; a second signal breaks that off."""
    first = False
    for server in servers:
        if server.should_exit:
            server.force_exit = True
        else:
            server.should_exit = first = True
    if first:
        logger.info("stopping: no new requests are taken, running ones are finished")


def _listen(hostname: str, port: int, flag: str) -> socket.socket:
    """Takes the port before anything is loaded, so that a port in use is told at once."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"cannot listen on {hostname!r} (--hostname): {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {hostname}:{port} ({flag}): {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _metrics_app(metrics: Metrics) -> ASGIApp:
    async def expose(_: Request) -> Response:
        return Response(metrics.expose(), media_type=CONTENT_TYPE)

    return Starlette(routes=[Route("/metrics", expose), Route("/", expose)])
