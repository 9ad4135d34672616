"""An HTTP/1.1 client that costs little: it shares the machine with the server that it measures."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools


class ServerUnavailable(Exception):
    """No connection, or one that broke. The message says which server and why."""


@dataclass(slots=True)
class TimedResponse:
    """started: when the request was sent; pieces: of the body, each with when it came (time.perf_counter, seconds)."""

    started: float
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class Connection:
    """One connection to a server, opened when it is needed and kept open; one request at a time."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Raises ValueError for what is not an http(s) URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8080")
        self._url = url
        self._host = parts.hostname
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n{authorization}"
        self._exchange: _Exchange | None = None

    async def request(self, method: str, path: str, body: bytes = b"", limit: float = 300.0) -> TimedResponse:
        """Sends a request and waits, for at most `limit` seconds, for the whole response.

        Raises ServerUnavailable when there is no response. A status that tells of an error is a response.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n"
        try:
            async with asyncio.timeout(limit):
                return await self._send(head.encode() + body)
        except TimeoutError:
            self.close()
            raise ServerUnavailable(f"{self._url} did not answer {path} within {limit:g} s") from None
        except (OSError, httptools.HttpParserError) as error:
            self.close()
            raise ServerUnavailable(f"{self._url} cannot be reached: {error}") from error

    @property
    def received(self) -> list[tuple[float, bytes]]:
        """Pieces of the response so far, each with when it came; of the last response, when none is awaited."""
        return [] if self._exchange is None else self._exchange.pieces

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    async def _send(self, request: bytes) -> TimedResponse:
        reused = self._exchange is not None and not self._exchange.closed
        try:
            return await (await self._open()).send(request)
        except ConnectionResetError:
            if not reused or self.received:
                raise
        return await (await self._open()).send(request)  # the server had given up the idle connection

    async def _open(self) -> "_Exchange":
        if self._exchange is None or self._exchange.closed:
            loop = asyncio.get_running_loop()
            _, self._exchange = await loop.create_connection(
                _Exchange, self._host, self._port, ssl=True if self._tls else None
            )
        return self._exchange


class _Exchange(asyncio.Protocol):
    """Feeds the parser, which calls the methods named `on_...`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[TimedResponse] | None = None
        self._now = 0.0
        self._response = TimedResponse(0.0)

    @property
    def pieces(self) -> list[tuple[float, bytes]]:
        return self._response.pieces

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def send(self, request: bytes) -> asyncio.Future[TimedResponse]:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter = asyncio.get_running_loop().create_future()
        self._response = TimedResponse(time.perf_counter())
        self._transport.write(request)
        return self._waiter

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self._waiter.done():
            self.close()
            return
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._waiter.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionResetError(error or "the server closed the connection"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._response.pieces.append((self._now, body))

    def on_message_complete(self) -> None:
        assert self._waiter is not None
        self._response.status = self._parser.get_status_code()
        self._response.ended = self._now
        if not self._parser.should_keep_alive():
            self.close()
        if not self._waiter.done():
            self._waiter.set_result(self._response)
