"""The HTTP transport of `huggingface_hub.InferenceClient`: every wait ends with the deadline of its call.

An HTTP client's read time-out limits the pause between two pieces of a response, so a server that sends one byte a
second is never late. Here each read asks the current `Call` for its remaining time, so that their sum is limited.
"""

import math
import select
import ssl
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

import httpcore2
import httpx2
from huggingface_hub import constants, set_client_factory
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from llm_functionalities.endpoint.call import Call, current_call
from llm_functionalities.endpoint.resolver import Resolver
from llm_functionalities.errors import (
    BadResponse,
    ConnectionLost,
    DeadlineExceeded,
    ModelError,
    ResponseTooLarge,
    Unreachable,
    Unread,
)
from shared.addresses import is_ip_address

# Seconds for which an idle connection is kept. Servers keep it longer (uvicorn: 5 s), so that none is used just as its
# server closes it.
KEEP_ALIVE_SECONDS = 3.0

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 0.2

# Maximum number of times that a request is sent if servers do not read it, each time over another connection.
SENDING_ATTEMPTS = 3
# Maximum bytes before the body of a response: its head, and all 1xx responses before it, read 64 KiB at a time.
LONGEST_HEAD = 128 * 1024
# Minimum mean length of a response's lines in bytes, because each line takes time to parse.
BYTES_PER_LINE = 16
# Seconds for which a connection to a host name is used, as the name may have moved to another address.
CONNECTION_SECONDS = 30.0
# Seconds to wait for the reset of a connection that the server has closed: it comes within a round trip.
RESET_SECONDS = 0.1


class BoundedBackend(httpcore2.NetworkBackend):
    """Connects to host names that `resolver` finds. Each address of a name gets at most `connect_timeout` seconds.

    It also gets at most its share of the call's time, so that an address that does not answer leaves time for the
    others. Up to `attempts` attempts are made, always within the call's time.
    """

    def __init__(self, resolver: Resolver, connect_timeout: float, attempts: int) -> None:
        self._resolver = resolver
        self._connect_timeout = connect_timeout
        self._attempts = attempts
        self._tcp = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Returns a connection. Raises Unresolvable, Unreachable, DeadlineExceeded or Cancelled."""
        call = current_call()
        retrying = Retrying(
            stop=stop_after_attempt(self._attempts),
            wait=wait_random_exponential(multiplier=FIRST_PAUSE_SECONDS, max=LONGEST_PAUSE_SECONDS),
            retry=retry_if_exception_type(Unreachable),
            sleep=call.pause,
            reraise=True,
        )
        return retrying(self._connect, host, port, call)

    def _connect(self, host: str, port: int, call: Call) -> httpcore2.NetworkStream:
        problem = "no address"
        addresses = self._resolver.resolve(host, call)
        for place, address in enumerate(addresses):
            seconds = min(self._connect_timeout, call.remaining() / (len(addresses) - place))
            try:
                stream = self._tcp.connect_tcp(address, port, seconds)
            except httpcore2.ConnectTimeout:
                call.remaining()  # the call's own time may have been the shorter one
                problem = f"no connection to {address} port {port} within {seconds:.3g} s"
            except httpcore2.ConnectError as error:
                problem = f"{address} port {port}: {error}"
            else:
                ends_at = math.inf if is_ip_address(host) else time.monotonic() + CONNECTION_SECONDS
                return BoundedStream(stream, self._connect_timeout, ends_at)
            self._resolver.put_last(host, address)
        self._resolver.forget(host)
        raise Unreachable(problem)


class BoundedStream(httpcore2.NetworkStream):
    """A connection that serves one call after another. Its waits end with the deadline of the call that it serves.

    ends_at: time from which it serves no further call, on the clock of `time.monotonic()`.
    """

    def __init__(self, stream: httpcore2.NetworkStream, handshake_timeout: float, ends_at: float = math.inf) -> None:
        self._stream = stream
        self._handshake_timeout = handshake_timeout
        self._ends_at = ends_at
        self._head_bytes = 0
        # State of the last request.
        self._is_answered = False
        self._write_failed = False

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Reads from the connection. Raises Unread if it ends without a response and the request was not read.

        A system resets a connection if its process closes it, or ends, with unread bytes. If everything was read, the
        connection ends without a reset.
        """
        try:
            data = self._stream.read(max_bytes, self._hold())
        except httpcore2.ReadTimeout:
            raise DeadlineExceeded("the deadline passed before the response came") from None
        except httpcore2.ReadError as error:
            current_call().remaining()  # a cancelled call's connection was shut down on purpose
            message = str(error) or type(error).__name__
            if not self._is_answered and isinstance(error.__cause__, ConnectionResetError | BrokenPipeError):
                raise Unread(f"the server closed the connection before reading the request: {message}") from None
            raise ConnectionLost(message) from None
        if data:
            self._is_answered = True
            if current_call().response_headers is None:
                self._head_bytes += len(data)
                if self._head_bytes > LONGEST_HEAD:
                    raise BadResponse(f"no response within the first {LONGEST_HEAD} bytes")
            return data
        current_call().remaining()  # a connection that was shut down looks like the end of a response
        if not self._is_answered and (self._write_failed or self._is_reset()):
            raise Unread("the server closed the connection before reading the request")
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._is_answered = self._write_failed = False
        self._head_bytes = 0
        seconds = self._hold()
        current_call().sent = True
        try:
            self._stream.write(buffer, seconds)
        except httpcore2.WriteTimeout:
            raise DeadlineExceeded("the deadline passed while the request was sent") from None
        except httpcore2.WriteError:
            self._write_failed = True
            raise

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        ssl_context.sslsocket_class = _HeldSSLSocket
        call = current_call()
        seconds = min(self._handshake_timeout, call.remaining())
        try:
            stream = self._stream.start_tls(ssl_context, server_hostname, seconds)
        except httpcore2.ConnectTimeout:
            call.remaining()  # the call's own time may have been the shorter one
            raise Unreachable(f"no TLS handshake with {server_hostname} within {seconds:.3g} s") from None
        except httpcore2.ConnectError as error:
            call.remaining()  # a cancelled call's connection was shut down on purpose
            raise Unreachable(f"TLS handshake with {server_hostname} failed: {error}") from None
        finally:
            call.release()
        return BoundedStream(stream, self._handshake_timeout, self._ends_at)

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        if info == "is_readable" and time.monotonic() > self._ends_at:
            return True  # the pool closes an idle connection that can be read, as the server has ended it
        return self._stream.get_extra_info(info)

    def _hold(self) -> float:
        return current_call().hold(self._stream.get_extra_info("socket"))

    def _is_reset(self) -> bool:
        """Returns True if the server's system resets the connection, which the server has closed with unread bytes."""
        reset = select.poll()
        reset.register(self._stream.get_extra_info("socket"), 0)  # errors and hang-ups are always reported
        return bool(reset.poll(RESET_SECONDS * 1000))


class _HeldSSLSocket(ssl.SSLSocket):
    """A TLS socket whose handshake ends with its call: `cancel` can shut it down instead of the plain socket."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            current_call().hold(self)
        except ModelError:
            self.close()
            raise
        super().do_handshake(block)


class BoundedTransport(httpx2.BaseTransport):
    """Sends requests within the current `Call` over pooled connections; again only if the server did not read one.

    Follows no redirects and uses no proxy of the environment: requests go only to the configured endpoint.
    """

    def __init__(self, backend: BoundedBackend, tls: ssl.SSLContext | None, max_response_bytes: int) -> None:
        self._pool = httpcore2.ConnectionPool(
            ssl_context=tls,
            max_connections=None,  # as many as there are workers
            keepalive_expiry=KEEP_ALIVE_SECONDS,
            network_backend=backend,
        )
        self._max_response_bytes = max_response_bytes

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Sends the request and returns the response. Raises ModelError."""
        call = current_call()
        call.check_unsent()
        attempts = Retrying(
            stop=stop_after_attempt(SENDING_ATTEMPTS), retry=retry_if_exception_type(Unread), reraise=True
        )
        response = attempts(self._send, request, call)
        bounded_response = httpx2.Response(
            status_code=response.status,
            headers=response.headers,
            stream=_BoundedBody(cast(httpx2.SyncByteStream, response.stream), call, self._max_response_bytes),
            extensions=response.extensions,
        )
        if (encoding := bounded_response.headers.get("content-encoding", "identity").lower()) != "identity":
            bounded_response.close()
            raise BadResponse(f"the response is encoded as {encoding}, which was not requested")
        if bounded_response.has_redirect_location and request.method == "POST":
            bounded_response.close()
            location = bounded_response.headers["location"][:200]
            raise BadResponse(f"{response.status}: the endpoint redirects to {location}; set its URL to the final one")
        call.response_headers = bounded_response.headers
        return bounded_response

    def close(self) -> None:
        self._pool.close()

    def _send(self, request: httpx2.Request, call: Call) -> httpcore2.Response:
        url = request.url
        try:
            return self._pool.handle_request(
                httpcore2.Request(
                    method=request.method,
                    url=httpcore2.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
                    headers=request.headers.raw,
                    content=cast(Iterable[bytes], request.stream),
                )
            )
        except Unread:
            call.allow_another()
            raise
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            call.remaining()
            raise ConnectionLost(str(error)) from None


class _BoundedBody(httpx2.SyncByteStream):
    """The bytes of a response. Raises ResponseTooLarge beyond `limit`, and BadResponse for too many short lines."""

    def __init__(self, stream: httpx2.SyncByteStream, call: Call, limit: int) -> None:
        self._stream = stream
        self._call = call
        self._limit = limit

    def __iter__(self) -> Iterator[bytes]:
        received = lines = 0
        try:
            for piece in self._stream:
                received += len(piece)
                lines += piece.count(b"\n")
                if received > self._limit:
                    raise ResponseTooLarge(f"the response is longer than {self._limit} bytes (--max-message-bytes)")
                if lines > self._limit // BYTES_PER_LINE:
                    raise BadResponse(f"the response has more than {self._limit // BYTES_PER_LINE} lines")
                yield piece
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            self._call.remaining()
            raise ConnectionLost(str(error)) from None

    def close(self) -> None:
        # The connection returns to the pool after this, and a late `cancel` must not affect the next call.
        self._call.release()
        self._stream.close()


def install(transport: BoundedTransport) -> httpx2.Client:
    """Makes every InferenceClient of the process use `transport`. Returns the HTTP client that they share."""
    # With telemetry on, the first request would fetch a list from huggingface.co to describe this machine.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    # The limit of a response counts received bytes, and a few compressed bytes may unpack to gigabytes.
    headers = {"accept-encoding": "identity"}
    client = httpx2.Client(transport=transport, headers=headers, timeout=None, follow_redirects=False, trust_env=False)
    set_client_factory(lambda: client)
    return client
