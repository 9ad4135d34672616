"""The HTTP transport of `huggingface_hub.InferenceClient`: every wait is bounded by the call that waits.

An HTTP client's read time-out bounds the pause between two pieces of a response, so a server that sends one byte a
second is never late. Here each read asks the current `Call` how much of its time is left, so their sum is bounded.
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

# Servers keep an idle connection longer (uvicorn: 5 s), so none is picked just as its server closes it.
KEEP_ALIVE_SECONDS = 3.0

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 0.2

# A request that a server has not read is sent this often in all, each time over another connection.
SENDING_ATTEMPTS = 3

# Bytes before the body of a response: of its head, and of all 1xx responses before it, which are read 64 KiB at a time.
LONGEST_HEAD = 128 * 1024

# Bytes that the lines of a response have on average at least, because each costs time of its own.
BYTES_PER_LINE = 16

# A connection to a host name is used for so long: the name may have moved to another address.
CONNECTION_SECONDS = 30.0

# The reset of a connection that was closed already follows within a round trip.
RESET_SECONDS = 0.1


class BoundedBackend(httpcore2.NetworkBackend):
    """Connects to host names that `resolver` finds. Each address of a name gets at most `connect_timeout` seconds.

    It gets no more than its share of the call's time, so that one which does not answer leaves time for the others. An
    attempt that fails is made again, up to `attempts` times in all, always within the call's time.
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
    """A connection that serves one call after another. No wait of it outlasts the call that it serves.

    ends_at: when it is not to serve another one, on the clock of `time.monotonic()`.
    """

    def __init__(self, stream: httpcore2.NetworkStream, handshake_timeout: float, ends_at: float = math.inf) -> None:
        self._stream = stream
        self._handshake_timeout = handshake_timeout
        self._ends_at = ends_at
        self._head_bytes = 0
        # Of the request that was sent last.
        self._is_answered = False
        self._write_failed = False

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Raises Unread if the connection ends before the response begins, and the server has not read the request.

        A system resets a connection that its process closes, or abandons, with unread bytes. One on
        which everything was read ends without a reset, whatever becomes of the process.
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
        """Returns True if the server's system resets the connection, which its process has closed."""
        reset = select.poll()
        reset.register(self._stream.get_extra_info("socket"), 0)  # errors and hang-ups are reported anyway
        return bool(reset.poll(RESET_SECONDS * 1000))


class _HeldSSLSocket(ssl.SSLSocket):
    """A socket whose handshake ends with its call. It takes the place of the plain socket before its handshake."""

    def do_handshake(self, block: bool = False) -> None:
        try:
            current_call().hold(self)
        except ModelError:
            self.close()
            raise
        super().do_handshake(block)


class BoundedTransport(httpx2.BaseTransport):
    """Sends each request within the current `Call` over connections that outlive it; again only if it was not read.

    No redirect is followed and no proxy of the environment is used: the endpoint is what it was configured to be.
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
    """The bytes of a response. Raises ResponseTooLarge when there are more than `limit`, BadResponse for tiny lines."""

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
        # The connection goes back to the pool after this, and a late `cancel` must not hit the next call.
        self._call.release()
        self._stream.close()


def install(transport: BoundedTransport) -> httpx2.Client:
    """Makes every InferenceClient of the process use `transport`. Returns the HTTP client that they share."""
    # With telemetry on, the first request would fetch a list from huggingface.co to describe this machine.
    constants.HF_HUB_DISABLE_TELEMETRY = True
    # The limit of a response counts the bytes that come, and a few compressed ones may hold gigabytes.
    headers = {"accept-encoding": "identity"}
    client = httpx2.Client(transport=transport, headers=headers, timeout=None, follow_redirects=False, trust_env=False)
    set_client_factory(lambda: client)
    return client
