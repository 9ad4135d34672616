"""Clients' connections: how long each may wait, how many there may be, and which is closed first."""

import asyncio
import ipaddress
import logging
import resource
import select
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from time import monotonic
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, HttpToolsProtocol

from tgi_server.router.api.memory import Account, memory_full
from tgi_server.router.errors import Overloaded, StartupError, error_body

logger = logging.getLogger(__name__)

# For shards, logs, the metrics' port, refusals on their way, and whatever the libraries open.
_RESERVED_FILES = 192
_MOST_CONNECTIONS = 4096
_QUIET_SECONDS = 10.0
# Bytes between two pieces of a body: a head, the trailers of a chunked body, or blank lines; and fields of a head.
_LARGEST_HEAD = 65_536
_MOST_FIELDS = 256
# Bytes outside of bodies that are parsed at once: a head may exceed its limit by as many.
_PIECE = 16_384
# Bytes of further requests that are read while one is answered.
_LARGEST_PIPELINE = 65_536
_END_OF_HEAD = b"\r\n\r\n"
# The socket event of a client that sends no more, or is gone.
_HANGUP: int = getattr(select, "POLLRDHUP", select.POLLHUP)
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_INVALID = "Invalid HTTP request received."
# Seconds that the first request of a connection may take to come when the server stops.
_LAST_SECONDS = 0.3

# In the state of a request's scope: ends the connection at once, with a refusal where no response has begun.
REFUSE = "refuse"
# In the same place: takes a function that is called if the connection is lost, in place of the last one; None: none is.
WATCH = "watch"
# In the same place: sends a whole response, as `ClientConnection.respond` does.
RESPOND = "respond"
Respond = Callable[[int, Sequence[tuple[bytes, bytes]], bytes], bool]


class ClientConnection(HttpToolsProtocol):
    """Is broken off by the server when the client does not do its part in time: begin a request, send it to its end, or
    take what is sent. Each has one deadline, which bytes that trickle in or out do not put off.

    A request is parsed once the one before it is answered. Until then its bytes wait, and few are read.

    turn_began: when the server began to wait for the client. waiting: it still does. receiving: a request has begun, or
    is the first.
    on_lost: called once the connection is lost. on_broken: called with the reason if that is amid a request or its
    response. on_data: called with the number of bytes that have come. host: the address that the client was
    accepted from. network: of that address.
    """

    on_lost: Callable[[], None] | None = None
    on_broken: Callable[[str], None] | None = None
    on_data: Callable[[int], None] | None = None
    host = network = ""
    turn_began = 0.0
    receiving = True
    waiting = False
    _unparsed = b""
    _in_head = True
    _head_bytes = 0
    # Bytes that are missing of a body whose length was announced.
    _body_left = 0
    # Of the head of the request that is received or answered.
    _head_size = 0
    _broken_off = _malformed = _stopping = False
    _left: Callable[[], object] | None = None
    _deadline: asyncio.TimerHandle | None = None
    _reading_deadline: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Bytes of requests that the application has not read, and of responses that the client has not read."""
        if self.transport is None:
            return 0
        body = 0 if self.cycle is None else len(self.cycle.body)
        return self.transport.get_write_buffer_size() + len(self._unparsed) + self._head_bytes + self._head_size + body

    @property
    def may_give_way(self) -> bool:
        """True while the server waits for the client, and for nothing else."""
        if self.transport is None or self._broken_off:
            return False
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def break_off(self) -> None:
        """Ends the connection; what has not been sent is dropped."""
        self._broken_off = True
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def refuse(self) -> None:
        """Ends the connection for the memory that it holds: with 429 where a request has no answer yet."""
        if self.transport is None or self._broken_off:
            return
        if not self._broken_by or (self.cycle is not None and self.cycle.response_started):
            self.break_off()
            return
        self._broken_off = True
        self._refuse(self.transport.write, refusal(memory_full()))

    def check_client(self) -> None:
        """Ends the connection if the client is gone, which is not noticed otherwise while the server does not read."""
        if self.transport is None or not self._answering or not self.flow.read_paused:
            return
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _HANGUP)
        if poll.poll(0):
            self.break_off()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client = self.client or (self.host, 0)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.on_broken is not None and (reason := self._broken_by):
            self.on_broken(reason)
        self._wait_no_more()
        if self._deadline is not None:
            self._deadline.cancel()
        self._is_read()
        self._unparsed = b""
        super().connection_lost(exc)
        if self._left is not None:
            self._left()
        if self.on_lost is not None:
            self.on_lost()

    def watch(self, left: Callable[[], object] | None) -> None:
        """Has `left` called when the connection is lost, at once if it is lost already."""
        self._left = left
        if left is not None and self.cycle.disconnected:
            left()

    def shutdown(self) -> None:
        """Ends the connection after the current request, or after its first one, which may be on its way."""
        self._stopping = True
        if self.cycle is None:
            self.loop.call_later(_LAST_SECONDS, self._end_unused)
        else:
            super().shutdown()

    def _end_unused(self) -> None:
        if self.cycle is None and not (self._head_bytes or self._unparsed):
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()
        if self.on_data is not None:
            self.on_data(len(data))

    def respond(self, status: int, fields: Sequence[tuple[bytes, bytes]], body: bytes) -> bool:
        """Sends a whole response at once. Returns False if uvicorn has to send it, which handles field by field and
        writes head and body apart.

        fields: of the head, `content-length` among them.
        """
        cycle = self.cycle
        if not cycle.keep_alive or cycle.disconnected or self.flow.write_paused or self.scope["method"] == "HEAD":
            return False
        if HEADER_VALUE_RE.search(b"".join([value for _, value in fields])):  # uvicorn refuses it
            return False
        head = b"".join([b"%b: %b\r\n" % field for field in fields])
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[status], head, body))
        cycle.on_response()
        return True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"] |= {REFUSE: self.refuse, WATCH: self.watch, RESPOND: self.respond}
        self.receiving = self._in_head = True
        self._wait()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Adds a field of the head. Fields of a trailer are dropped, as they may change nothing (RFC 9110, 6.5.1)."""
        if not self._in_head:
            return
        if len(self.headers) == _MOST_FIELDS:
            self._head_bytes += _LARGEST_HEAD
            raise httptools.HttpParserError("too many fields")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # the head comes again
            return
        self._in_head = False
        self._head_size, self._head_bytes = self._head_bytes, 0
        # The parser has made sure that it is a number, and that there is one at most.
        self._body_left = int(next((value for name, value in self.headers if name == b"content-length"), b"0"))
        super().on_headers_complete()
        if self._stopping:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

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
        """Goes on with the next request. Uvicorn's method would set another deadline."""
        self._head_size = 0
        if not self.transport.is_closing():
            self.flow.resume_reading()
        self._wait_for_next()
        self._parse()

    def pause_writing(self) -> None:
        """Called when the client has not read more than the transport's high-water mark."""
        super().pause_writing()
        if self._reading_deadline is None:
            self._reading_deadline = self.loop.call_later(self.timeout_keep_alive, self.break_off)

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    @property
    def _broken_by(self) -> str:
        """Returns who ended the connection amid a request or its response, or why; empty if it ended between two."""
        if self._malformed:
            return "malformed"
        if self._broken_off:
            return "server"
        return "client" if self._answering or not self._in_head or self._head_bytes or self._unparsed else ""

    @property
    def _answering(self) -> bool:
        """True while a complete request is not answered."""
        return not self.receiving and not self.cycle.response_complete

    def _parse(self) -> None:
        """Parses what has come, up to the end of a request that is to be answered first."""
        data, start = self._unparsed, 0
        while not self.transport.is_closing() and not self._answering:
            end = self._end_of_piece(data, start)
            if end == start:
                break
            self._parse_piece(memoryview(data)[start:end])
            start = end
        self._unparsed = b"" if self.transport.is_closing() else data[start:]
        if len(self._unparsed) > _LARGEST_PIPELINE:
            self.flow.pause_reading()

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Returns how far the parser may read at once: no further than a request may go. Some bytes may have to wait.

        A request ends with its body, if the length of that was announced, or else with an empty line.
        """
        if self._body_left:
            return min(start + self._body_left, len(data))
        stop = min(start + _PIECE, len(data))
        end = data.find(_END_OF_HEAD, start, stop)
        if end >= 0:
            return end + len(_END_OF_HEAD)
        begun = next(size for size in (3, 2, 1, 0) if data.endswith(_END_OF_HEAD[:size], start, stop))
        return stop - begun

    def _parse_piece(self, piece: memoryview) -> None:
        if self._body_left:
            self._body_left -= len(piece)
        else:
            self._head_bytes += len(piece)
        malformed = False
        try:
            self._feed(piece)
        except httptools.HttpParserError:
            malformed = True
        self._malformed = malformed or self._head_bytes > _LARGEST_HEAD
        if self._head_bytes > _LARGEST_HEAD:
            self._refuse(self.transport.write, _TOO_LARGE)
        elif malformed:
            self.logger.warning(_INVALID)
            self._refuse(self.send_400_response, _INVALID)

    def _refuse(self, send: Callable[[Any], None], refusal: Any) -> None:
        """Ends the connection, with a refusal unless the request has an answer already."""
        if self.cycle is None or self._in_head or not self.cycle.response_started:
            send(refusal)
        self.transport.close()

    def _feed(self, data: memoryview) -> None:
        """Parses; a request for another protocol is ignored (RFC 9110, 7.8). Raises HttpParserError.

        The parser takes such a request to end with its head. So the head is read again, without the field `Upgrade`.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":  # what follows is for another host
                raise httptools.HttpParserError("this is not a proxy")
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
        self.waiting = True
        self.turn_began = self.loop.time()
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.timeout_keep_alive, self._look_at_time)

    def _wait_no_more(self) -> None:
        """Ends the wait. Its timer stays, for the next one: making timers takes longer than looking at the time."""
        self.waiting = False

    def _look_at_time(self) -> None:
        self._deadline = None
        if not self.waiting:
            return
        left = self.turn_began + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._deadline = self.loop.call_later(left, self._look_at_time)
        elif self.flow.read_paused:  # the wait is the server's doing
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

    When there are too many, the one that has waited longest for its client is closed: first those between two
    requests, then those within one, and of the address that has most. One whose client waits for an answer stays.
    """

    def __init__(self, limit: int, per_address: int, memory: int = 2**30) -> None:
        """memory: bytes that may be held for all of them. An address may have the same part of it as of connections.

        `on_broken` is called for each connection that ends amid a request or its response, with the reason.
        """
        self.account = Account(memory, per_address / limit)
        self._limit = limit
        self._per_address = per_address
        self._of: dict[str, set[ClientConnection]] = {}
        self._count = 0
        self._told = 0.0
        self.on_broken: Callable[[str], None] = lambda reason: None

    def __len__(self) -> int:
        return self._count

    def fault(self, host: str) -> str | None:
        """Returns why a client of that address is refused; None if it is not, for which another may be closed."""
        own = self._of.get(network_of(host), set())
        if len(own) >= self._per_address and not self._give_way([own]):
            return f"{len(own)} connections from your address are open (--max-connections-per-address)"
        if self._count >= self._limit and not self.relieve():
            return f"{self._count} connections are open (--max-connections)"
        return None

    def add(self, host: str, connection: ClientConnection) -> None:
        """Counts the connection until it is lost."""
        self._of.setdefault(network_of(host), set()).add(connection)
        self._count += 1
        connection.host, connection.network = host, network_of(host)
        connection.on_lost = lambda: self.remove(host, connection)
        connection.on_broken = lambda reason: self.on_broken(reason)
        connection.on_data = self.account.grew
        self.account.add(connection)

    def remove(self, host: str, connection: ClientConnection) -> None:
        """Counts the connection no more."""
        self.account.remove(connection)
        network = network_of(host)
        own = self._of.get(network, set())
        if connection in own:
            own.remove(connection)
            self._count -= 1
            if not own:
                del self._of[network]

    def relieve(self) -> bool:
        """Closes one connection. Returns False if all have clients that wait for an answer."""
        return self._give_way(sorted(self._of.values(), key=len, reverse=True))

    def check_clients(self) -> None:
        """Ends connections whose clients are gone, which is not noticed otherwise while the server does not read."""
        for connection in [each for own in self._of.values() for each in own]:
            connection.check_client()

    def warn(self, reason: str) -> None:
        """Logs why connections are refused, at most every few seconds."""
        if monotonic() - self._told > _QUIET_SECONDS:
            self._told = monotonic()
            logger.warning("connections are refused: %s", reason)

    def _give_way(self, groups: Iterable[set[ClientConnection]]) -> bool:
        for group in groups:
            waiting = [each for each in group if each.may_give_way]
            if waiting:
                min(waiting, key=lambda each: (each.receiving, each.turn_began)).break_off()
                return True
        return False


def refusal(error: Overloaded) -> bytes:
    """Returns a whole response of HTTP, after which the connection ends."""
    body = msgspec.json.encode(error_body(error, "/"))
    head = (
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """Returns what counts as one address: of IPv6, the part that a network has to itself."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
