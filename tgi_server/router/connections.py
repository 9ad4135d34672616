"""Who is connected: how many may be, who gives way when there are too many, and taking new ones in."""

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
from collections.abc import Callable, Iterable
from time import monotonic

from tgi_server.router.api.answers import error_text
from tgi_server.router.connection import ClientConnection
from tgi_server.router.errors import Overloaded, StartupError

logger = logging.getLogger(__name__)

_RESERVED_FILES = 192
"""For shards, logs, the metrics' port, refusals on their way, and whatever the libraries open."""
_MOST_CONNECTIONS = 8192
_LARGEST_BACKLOG = 256 * 2**20
"""Bytes that may wait for the clients of a server together."""
_TAKEN_AT_ONCE = 64
_REFUSALS_AT_ONCE = 32
_REFUSAL_SECONDS = 0.5
_PAUSE_SECONDS = 0.1
_QUIET_SECONDS = 10.0
_OUT_OF_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def connection_limits(limit: int | None, per_address: int | None) -> tuple[int, int]:
    """Returns how many connections a server may have, and how many of one address. None: as the open files allow.

    Raises StartupError for more than the process can have open.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        files = 2**20
    available = files - min(_RESERVED_FILES, files // 2)
    if limit is not None and limit > available:
        raise StartupError(
            f"--max-connections is {limit}; with {files} open files there may be {available}: raise the limit of open "
            "files (ulimit -n), or lower --max-connections"
        )
    limit = limit or min(available, _MOST_CONNECTIONS)
    return limit, min(per_address or -(-limit // 2), limit)


class Connections:
    """The connections of one server, by address.

    When there are too many, the one gives way that has waited longest for its client: first those between two
    requests, then those within one, and of the address that has most. Whoever waits for an answer stays.
    """

    def __init__(self, limit: int, per_address: int) -> None:
        self._limit = limit
        self._per_address = per_address
        self._of: dict[str, set[ClientConnection]] = {}
        self._count = 0
        self._told = 0.0

    def __len__(self) -> int:
        return self._count

    def fault(self, host: str) -> str | None:
        """Returns why a client of that address cannot be taken in; None if it can, for which another may give way."""
        own = self._of.get(_network(host), set())
        if len(own) >= self._per_address and not self._give_way([own]):
            return f"{len(own)} connections from your address are open (--max-connections-per-address)"
        if self._count >= self._limit and not self.relieve():
            return f"{self._count} connections are open (--max-connections)"
        return None

    def add(self, host: str, connection: ClientConnection) -> None:
        """Counts the connection until it is lost."""
        self._of.setdefault(_network(host), set()).add(connection)
        self._count += 1
        connection.on_lost = lambda: self.remove(host, connection)

    def remove(self, host: str, connection: ClientConnection) -> None:
        """Counts the connection no more."""
        network = _network(host)
        own = self._of.get(network, set())
        if connection in own:
            own.remove(connection)
            self._count -= 1
            if not own:
                del self._of[network]

    def relieve(self) -> bool:
        """Has one connection give way. Returns False if all have clients that wait for an answer."""
        return self._give_way(sorted(self._of.values(), key=len, reverse=True))

    def shed(self) -> None:
        """Ends connections whose clients leave too much unread, the largest first, until the rest is bearable."""
        unread = {each: each.unread for own in self._of.values() for each in own if each.unread}
        total = sum(unread.values())
        for connection in sorted(unread, key=unread.__getitem__, reverse=True):
            if total <= _LARGEST_BACKLOG:
                return
            total -= unread[connection]
            logger.warning("a client that left %d bytes unread was cut off: too much waits", unread[connection])
            connection.break_off()

    def warn(self, reason: str) -> None:
        """Logs why clients are turned away, once in a while."""
        if monotonic() - self._told > _QUIET_SECONDS:
            self._told = monotonic()
            logger.warning("clients are turned away: %s", reason)

    def _give_way(self, groups: Iterable[set[ClientConnection]]) -> bool:
        for group in groups:
            waiting = [each for each in group if each.may_give_way]
            if waiting:
                min(waiting, key=lambda each: (each.receiving, each.turn_began)).break_off()
                return True
        return False


class Acceptor:
    """Takes clients in from a listening socket; goes on when the process has run out of files.

    The event loop's own way of accepting would count nobody, and uvloop's closes the listener on such an error.
    """

    def __init__(
        self, listener: socket.socket, backlog: int, make: Callable[[], ClientConnection], connections: Connections
    ) -> None:
        self._listener = listener
        self._make = make
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._refused: set[socket.socket] = set()
        self._paused: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Takes nobody in any more."""
        if self._paused is not None:
            self._paused.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """Returns at once: connections are waited for by their server."""

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_TAKEN_AT_ONCE):
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
            logger.debug("a client was gone before it was taken in: %s", error)

    def _refuse(self, client: socket.socket, fault: str) -> None:
        """Tells the client why, and closes a little later: bytes that nobody has read would take the words back."""
        self._connections.warn(fault)
        if len(self._refused) >= _REFUSALS_AT_ONCE:
            client.close()
            return
        body = error_text(Overloaded(f"{fault}; try again later"), "/").encode()
        head = (
            "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        try:
            client.send(head.encode() + body)
            client.shutdown(socket.SHUT_WR)
        except OSError:
            client.close()
            return
        self._refused.add(client)
        self._loop.call_later(_REFUSAL_SECONDS, self._forget, client)

    def _forget(self, client: socket.socket) -> None:
        self._refused.discard(client)
        client.close()


def _network(host: str) -> str:
    """Returns what counts as one address: of IPv6, the part that a network has to itself."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
