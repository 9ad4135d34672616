"""Clients' connections: how long each may wait, how many there may be, and which gives way."""

import asyncio
import ipaddress
import logging
import resource
from collections.abc import Callable, Iterable
from time import monotonic

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tgi_server.router.errors import StartupError

logger = logging.getLogger(__name__)

# For shards, logs, the metrics' port, refusals on their way, and whatever the libraries open.
_RESERVED_FILES = 192
_MOST_CONNECTIONS = 4096
# Bytes that all clients of a server together may have it hold: of requests to come, and of answers to be taken.
_LARGEST_BACKLOG = 256 * 2**20
_QUIET_SECONDS = 10.0
_LARGEST_HEAD = 65_536
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_INVALID = "Invalid HTTP request received."

# In the state of a request's scope: ends the connection at once, whatever is still to be sent.
BREAK_OFF = "break_off"


class ClientConnection(HttpToolsProtocol):
    """Is broken off by the server when the client does not do its part in time: begin a request, send it to its end, or
    take what is sent. Each has one deadline, which bytes that trickle in or out do not put off.

    turn_began: when the server began to wait for the client. receiving: a request has begun, or is the first.
    on_lost: called once the connection is no more.
    """

    on_lost: Callable[[], None] | None = None
    turn_began = 0.0
    receiving = True
    _in_head = True
    _head_bytes = 0
    _received = 0
    _broken_off = False
    _deadline: asyncio.TimerHandle | None = None
    _reading_deadline: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Bytes of a request that is not complete, and of answers that the client has not taken."""
        if self.transport is None:
            return 0
        return self.transport.get_write_buffer_size() + (self._received if self.receiving else 0)

    @property
    def may_give_way(self) -> bool:
        """True while the server waits for the client, and for nothing else."""
        if self.transport is None or self._broken_off or self.pipeline:
            return False
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def break_off(self) -> None:
        """Ends the connection; what has not been sent is dropped."""
        self._broken_off = True
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        self._is_read()
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        self._received += len(data)
        self._unset_keepalive_if_required()
        try:
            self._read(data)
        except httptools.HttpParserError:
            self.logger.warning(_INVALID)
            self.send_400_response(_INVALID)
        if self._in_head and self._head_bytes > _LARGEST_HEAD and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][BREAK_OFF] = self.break_off
        self.receiving = self._in_head = True
        self._received = 0
        self._wait()

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # the head comes again
            return
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self.receiving = False
        self._in_head = True
        self._head_bytes = 0
        self._wait_no_more()
        self._wait_for_next()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_next()

    def pause_writing(self) -> None:
        """The client is behind by more than the transport's high-water mark."""
        super().pause_writing()
        if self._reading_deadline is None:
            self._reading_deadline = self.loop.call_later(self.timeout_keep_alive, self.break_off)

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def _read(self, data: bytes) -> None:
        """Reads on; that a request asks for another protocol is passed over (RFC 9110, 7.8). Raises HttpParserError.

        The parser takes such a request to end with its head. So the head is read again, without the field `Upgrade`.
        """
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":  # what follows is for another host
                raise httptools.HttpParserError("this is no proxy")
            fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            self.parser.feed_data(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(fields)))

    def _wait_for_next(self) -> None:
        """Begins to wait for the next request if the last one has come and been answered."""
        if not self.receiving and self.cycle.response_complete:
            self._wait()

    def _is_read(self) -> None:
        if self._reading_deadline is not None:
            self._reading_deadline.cancel()
            self._reading_deadline = None

    def _wait(self) -> None:
        self._wait_no_more()
        self.turn_began = self.loop.time()
        self._deadline = self.loop.call_later(self.timeout_keep_alive, self._out_of_time)

    def _wait_no_more(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _out_of_time(self) -> None:
        if self.flow.read_paused:  # the wait is the server's doing
            self._wait()
        else:
            self.break_off()


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
        """Ends connections for which too much is held, the largest first, until the rest is bearable."""
        held = {each: size for own in self._of.values() for each in own if (size := each.held)}
        total = sum(held.values())
        for connection in sorted(held, key=held.__getitem__, reverse=True):
            if total <= _LARGEST_BACKLOG:
                return
            total -= held[connection]
            logger.warning("a client for whom %d bytes waited was cut off: too much waits", held[connection])
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


def _network(host: str) -> str:
    """Returns what counts as one address: of IPv6, the part that a network has to itself."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
