"""Serving HTTP, and a graceful end."""

import asyncio
import errno
import logging
import math
import socket
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.processes import port_name
from tgi_server.router.api.connections import (
    REFUSE,
    RESPOND,
    ClientConnection,
    Connections,
    Respond,
    network_of,
    refusal,
)
from tgi_server.router.api.memory import LEASE, Account, Lease
from tgi_server.router.errors import Overloaded, StartupError

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# Seconds: Linux takes no more, see MAX_TCP_KEEPIDLE of its net/tcp.h.
_LONGEST_KEEPIDLE = 32767
_WATCH_SECONDS = 1.0
_TAKEN_AT_ONCE = 16
_REFUSALS_AT_ONCE = 32
_REFUSAL_SECONDS = 0.5
_PAUSE_SECONDS = 0.1
# Bytes of a response that are handed to the event loop at once, and that the system has and has not sent.
_LARGEST_PIECE = 65_536
_UNSENT = 131_072
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class HttpServer(uvicorn.Server):
    """Serves `app`; `should_exit` ends it, after which requests have `grace` seconds left.

    patience: seconds that a client may take to send a request, and to take what is sent. connections: how many may be.
    """

    def __init__(self, app: ASGIApp, grace: float, patience: int, connections: Connections) -> None:
        self.open_connections = connections
        config = uvicorn.Config(
            _with_lease(app, connections.account),
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
        _bound_silence(sockets or (), self.config.timeout_keep_alive)
        watching = asyncio.create_task(self._watch_clients())
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        def connection() -> ClientConnection:
            return ClientConnection(self.config, self.server_state, app_state={})

        acceptors = [Acceptor(each, connection, self.open_connections) for each in sockets or ()]
        self.servers = acceptors  # type: ignore[assignment]  # they are closed in the same way
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes in the clients that the system has accepted before the port is closed, which would reset them."""
        for acceptor in self.servers:
            assert isinstance(acceptor, Acceptor)
            await acceptor.take_waiting()
        await super().shutdown(sockets)

    async def _watch_clients(self) -> None:
        """Looks for clients that are gone, and for a lack of memory; also while the last requests are finished."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            self.open_connections.check_clients()
            self.open_connections.account.shed()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are for all servers of the process together."""
        yield


def _with_lease(app: ASGIApp, account: Account) -> ASGIApp:
    """Returns `app`, with a lease of the account for each request until nothing runs for it any more.

    No traceback of a request is logged that is cancelled after the drain.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["state"]
        lease = state[LEASE] = Lease(account, network_of(scope["client"][0]), state[REFUSE])
        account.add(lease)
        try:
            await app(scope, receive, _Sender(send, state[RESPOND], lease))
        except asyncio.CancelledError:
            pass
        finally:
            account.remove(lease)
            lease.answer = lease.end = None

    return call


class _Sender:
    """Sends one response: a short one at once, and a large body in pieces, of which only what the client takes leaves
    the account.
    """

    __slots__ = ("_head", "_lease", "_respond", "_send")

    def __init__(self, send: Send, respond: Respond, lease: Lease) -> None:
        self._send = send
        self._respond = respond
        self._lease = lease
        self._head: Message | None = None  # until its body comes, whose length is known

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and b"content-length" in dict(message["headers"]):
            self._head = message
            return
        body, more = message.get("body", b""), message.get("more_body", False)
        short = len(body) <= _LARGEST_PIECE
        if self._head is not None:
            head, self._head = self._head, None
            if short and not more and self._respond(head["status"], head["headers"], body):
                return
            await self._send(head)
        if short:
            await self._send(message)
            return
        self._lease.sending = len(body)
        for start in range(0, len(body), _LARGEST_PIECE):
            end = start + _LARGEST_PIECE
            piece = {**message, "body": bytes(body[start:end]), "more_body": more or end < len(body)}
            await self._send(piece)
        self._lease.sending = 0


def drain(servers: Iterable[uvicorn.Server]) -> None:
    """Has the servers take no more, and finish what runs; a second signal breaks that off."""
    first = False
    for server in servers:
        if server.should_exit:
            server.force_exit = True
        else:
            server.should_exit = first = True
    if first:
        logger.info("stopping: new requests are refused, running ones are finished")


class Acceptor:
    """Accepts clients from a listening socket, also after the process has run out of files.

    The event loop's own way of accepting would count no clients, and uvloop's closes the listener on such an error.
    """

    def __init__(self, listener: socket.socket, make: Callable[[], ClientConnection], connections: Connections) -> None:
        self._listener = listener
        self._make = make
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._refused: set[socket.socket] = set()
        self._paused: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accepts no more connections."""
        if self._paused is not None:
            self._paused.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def take_waiting(self) -> None:
        """Takes in all clients that the system has accepted. Returns once their connections are open."""
        if self._paused is None:
            self._accept(_BACKLOG)
        if self._opening:
            await asyncio.wait(self._opening)

    async def wait_closed(self) -> None:
        """Returns at once: connections are waited for by their server."""

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self, most: int = _TAKEN_AT_ONCE) -> None:
        for _ in range(most):
            try:
                client, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # it is gone already
                continue
            except OSError as error:
                self._pause(error)
                return
            client.setblocking(False)
            fault = self._connections.fault(address[0])
            if fault is None:
                self._open(address[0], client)
            else:
                self._refuse(client, fault)

    def _pause(self, error: OSError) -> None:
        """Waits a little: the client is still in the listener's queue, and the error would come again at once."""
        self._connections.warn(f"{error.strerror} (ulimit -n)" if error.errno in _OUT_OF_FILES else str(error))
        self._connections.relieve()
        self._loop.remove_reader(self._listener)
        self._paused = self._loop.call_later(_PAUSE_SECONDS, self._resume)

    def _open(self, host: str, client: socket.socket) -> None:
        connection = self._make()
        self._connections.add(host, connection)
        task = self._loop.create_task(self._connect(host, connection, client))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, host: str, connection: ClientConnection, client: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client)
        except OSError as error:
            self._connections.remove(host, connection)
            client.close()
            logger.debug("a client disconnected before its connection was accepted: %s", error)

    def _refuse(self, client: socket.socket, fault: str) -> None:
        """Sends the reason to the client, and closes a little later: unread bytes would discard it."""
        self._connections.warn(fault)
        if len(self._refused) >= _REFUSALS_AT_ONCE:
            client.close()
            return
        try:
            client.send(refusal(Overloaded(f"{fault}; try again later")))
            client.shutdown(socket.SHUT_WR)
        except OSError:
            client.close()
            return
        self._refused.add(client)
        self._loop.call_later(_REFUSAL_SECONDS, self._forget, client)

    def _forget(self, client: socket.socket) -> None:
        self._refused.discard(client)
        client.close()


def _bound_silence(listeners: Iterable[socket.socket], seconds: int) -> None:
    """Has the system break off connections, taken from now on, whose client takes nothing of what is sent for so long.

    Nor does the system take in megabytes of a response that the client does not. Only Linux can tell; it passes a
    listener's options on to its connections.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        for listener in listeners:
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(seconds, _LONGEST_KEEPIDLE))


class ReservedSocket(socket.socket):
    """A socket that has its port to itself from `bind` on. Clients are refused until it listens.

    A server that is started again needs SO_REUSEADDR; with it, Linux lets any number of sockets bind to a port until
    one of them listens. So each holds, until then, a name that only one may have: that of an abstract Unix socket
    (unix(7)), which is gone with its process.
    """

    def __init__(self, family: int, kind: int, protocol: int) -> None:
        super().__init__(family, kind, protocol)
        self._name = socket.socket(socket.AF_UNIX)

    def bind(self, address: Any) -> None:
        host, port = address[:2]
        if sys.platform == "linux" and port:
            self._name.bind(port_name(host, port))
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        super().bind(address)

    def listen(self, backlog: int = _BACKLOG) -> None:
        super().listen(backlog)
        self._name.close()

    def close(self) -> None:
        self._name.close()
        super().close()


def reserve(hostname: str, port: int, flag: str) -> ReservedSocket:
    """Takes the port before anything is loaded, so that a port in use is reported at once. Raises StartupError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            hostname, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartupError(f"cannot listen on {hostname!r} (--hostname): {error.strerror}") from error
    listener = ReservedSocket(family, kind, protocol)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise StartupError(f"cannot listen on {hostname}:{port} ({flag}): {error.strerror}") from error
    listener.setblocking(False)
    return listener


def listen(listeners: Iterable[ReservedSocket]) -> None:
    """Lets clients in. Raises StartupError when another kind of server has taken a port since it was reserved."""
    for listener in listeners:
        host, port = listener.getsockname()[:2]
        try:
            listener.listen()
        except OSError as error:
            raise StartupError(f"cannot listen on {host}:{port}: {error.strerror}") from error
