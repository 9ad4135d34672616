"""Clients' connections: time-outs, the maximum number of connections, and which one is closed first."""

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

# Files that are kept free for shards, logs, the port for metrics, refusals in progress, and libraries.
_RESERVED_FILES = 192
_MOST_CONNECTIONS = 4096
_QUIET_SECONDS = 10.0
# Maximum bytes between two pieces of a body: a head, the trailers of a chunked body, or blank lines; and maximum fields
# of a head.
_LARGEST_HEAD = 65_536
_MOST_FIELDS = 256
# Bytes outside of bodies that are parsed at once: a head may exceed its limit by this much.
_PIECE = 16_384
# Maximum bytes of further requests that are read while one is answered.
_LARGEST_PIPELINE = 65_536
_END_OF_HEAD = b"\r\n\r\n"
# The socket event of a client that has closed its side of the connection.
_HANGUP: int = getattr(select, "POLLRDHUP", select.POLLHUP)
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_INVALID = "Invalid HTTP request received."
# When the server stops, seconds within which a new connection's first request may still arrive.
_LAST_SECONDS = 0.3
# Keys in the state of a request's scope. REFUSE: a function that ends the connection at once, with an error response if
# none has begun.
REFUSE = "refuse"
# A function that sets the callback for a lost connection; None removes it.
WATCH = "watch"
# A function that sends a whole response: `ClientConnection.respond`.
RESPOND = "respond"
Respond = Callable[[int, Sequence[tuple[bytes, bytes]], bytes], bool]


class ClientConnection(HttpToolsProtocol):
    """A connection with time-outs for the client to begin a request, to complete it, and to read the response.

    Each time-out is for the whole, and bytes that trickle in or out do not extend it.

    A request is parsed once the one before it has been answered. Until then its bytes are buffered, up to a limit.

    turn_began: time at which the server began to wait for the client. waiting: True while it does. receiving: True if a
    request has begun, or none has come yet.
    on_lost: called once the connection is lost. on_broken: called with the reason if it is lost during a request or
    response. on_data: called with the number of bytes received. host: the client's address. network: `network_of` it.
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
    # Bytes still missing of a body with a content length.
    _body_left = 0
    # Bytes of the head of the request that is received or answered.
    _head_size = 0
    _broken_off = _malformed = _stopping = False
    _left: Callable[[], object] | None = None
    _deadline: asyncio.TimerHandle | None = None
    _reading_deadline: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Bytes of requests that the application has not read yet, and of responses that the client has not read."""
        if self.transport is None:
            return 0
        body = 0 if self.cycle is None else len(self.cycle.body)
        return self.transport.get_write_buffer_size() + len(self._unparsed) + self._head_bytes + self._head_size + body

    @property
    def may_give_way(self) -> bool:
        """True while the server only waits for the client, so that the connection may be closed for another one."""
        if self.transport is None or self._broken_off:
            return False
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def break_off(self) -> None:
        """Closes the connection, and drops data that has not been sent."""
        self._broken_off = True
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def refuse(self) -> None:
        """Closes the connection because of the memory that it holds: with 429 if a request has no response yet."""
        if self.transport is None or self._broken_off:
            return
        if not self._broken_by or (self.cycle is not None and self.cycle.response_started):
            self.break_off()
            return
        self._broken_off = True
        self._refuse(self.transport.write, refusal(memory_full()))

    def check_client(self) -> None:
        """Closes the connection if the client is gone. Needed while reading is paused, as that is not noticed then."""
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
        """Sets the callback for a lost connection. Calls it at once if the connection is lost already."""
        self._left = left
        if left is not None and self.cycle.disconnected:
            left()

    def shutdown(self) -> None:
        """Closes the connection after the current request, or after a first one that may be arriving."""
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
        """Sends a whole response with one write. Returns False if the caller has to send it through uvicorn instead.

        Uvicorn processes header by header and writes head and body separately, which is slower. fields: the headers,
        including `content-length`.
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
        """Adds a header. Fields of a trailer are dropped, as they must not have an effect (RFC 9110, 6.5.1)."""
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
        # The parser has checked that it is a number, and that there is at most one.
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
        """Continues with the next request. Uvicorn's method would set another time-out."""
        self._head_size = 0
        if not self.transport.is_closing():
            self.flow.resume_reading()
        self._wait_for_next()
        self._parse()

    def pause_writing(self) -> None:
        """Starts the time-out for a client that does not read: its unread data exceeds the high-water mark."""
        super().pause_writing()
        if self._reading_deadline is None:
            self._reading_deadline = self.loop.call_later(self.timeout_keep_alive, self.break_off)

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    @property
    def _broken_by(self) -> str:
        """The cause of an end during a request or response: "malformed", "server" or "client"; empty between two."""
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
        """Parses the received bytes, up to the end of the next request, which has to be answered first."""
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
        """Returns the end of the bytes that the parser may read at once: not beyond the end of a request.

        A request ends with its body if that has a content length, else with an empty line. If the data ends with the
        beginning of one, these bytes have to wait.
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
        """Closes the connection, after an error response unless another response has begun."""
        if self.cycle is None or self._in_head or not self.cycle.response_started:
            send(refusal)
        self.transport.close()

    def _feed(self, data: memoryview) -> None:
        """Parses data, and ignores requests for an upgrade to another protocol (RFC 9110, 7.8). Raises HttpParserError.

        The parser ends such a request after its head. So the head is parsed again without the field `Upgrade`.
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
        """Starts to wait for the next request if the last one is complete and answered."""
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
        """Ends the wait. The timer is kept for the next wait: creating one takes longer than checking the time."""
        self.waiting = False

    def _look_at_time(self) -> None:
        self._deadline = None
        if not self.waiting:
            return
        left = self.turn_began + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._deadline = self.loop.call_later(left, self._look_at_time)
        elif self.flow.read_paused:  # the server itself does not read
            self._wait()
        else:
            self.break_off()


def connection_limits(limit: int | None, per_address: int | None) -> tuple[int, int]:
    """Returns the maximum number of connections, in all and of one address. None: as the limit of open files allows.

    Raises StartupError if that limit does not allow `limit` connections.
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

    If there are too many, one of the address with most connections is closed: the one that has waited longest for its
    client, and one between two requests before one that receives a request. A connection whose client waits for an
    answer is never closed.
    """

    def __init__(self, limit: int, per_address: int, memory: int = 2**30) -> None:
        """memory: maximum bytes that are held for all of them. An address may have the same share as of connections.

        `on_broken` is called with the reason for each connection that ends during a request or response.
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
        """Returns why a client of this address is refused; None if it is accepted. May close another connection."""
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
        """Stops counting the connection."""
        self.account.remove(connection)
        network = network_of(host)
        own = self._of.get(network, set())
        if connection in own:
            own.remove(connection)
            self._count -= 1
            if not own:
                del self._of[network]

    def relieve(self) -> bool:
        """Closes one connection. Returns False if all clients wait for an answer."""
        return self._give_way(sorted(self._of.values(), key=len, reverse=True))

    def check_clients(self) -> None:
        """Closes connections whose clients are gone, see `ClientConnection.check_client`."""
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
    """Returns the bytes of a complete HTTP response, after which the connection is closed."""
    body = msgspec.json.encode(error_body(error, "/"))
    head = (
        "HTTP/1.1 429 Too Many Requests\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


@lru_cache(maxsize=4096)
def network_of(host: str) -> str:
    """Returns the client that an address counts for: for IPv6, its /64 network; otherwise the address itself."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host
