"""Connections to model servers whose every wait is bounded by the call that uses them.

An HTTP client's read time-out bounds the pause between two pieces of an answer, so a server that sends one byte
a second is never late. Here each read asks the current `Call` what is left of its time, so the sum is bounded.
"""

import ssl
from collections.abc import Iterable
from typing import Any

import httpcore2
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from llm_functionalities.call import Call, current_call
from llm_functionalities.errors import ConnectionLost, DeadlineExceeded, Unreachable
from llm_functionalities.resolver import Resolver

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 0.2


class BoundedBackend(httpcore2.NetworkBackend):
    """Connects to host names through `resolver`, each attempt within `connect_timeout` seconds.

    A refused or lost attempt is made again, up to `attempts` times in all, always within the call's time.
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
        """Raises Unresolvable, Unreachable, DeadlineExceeded or Cancelled."""
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
        for address in self._resolver.resolve(host, call):
            remaining = call.remaining()
            try:
                stream = self._tcp.connect_tcp(address, port, min(self._connect_timeout, remaining))
            except httpcore2.ConnectTimeout:
                call.remaining()  # the call's own time may have been the shorter one
                problem = f"no connection to {address} port {port} within {self._connect_timeout:g} s"
            except httpcore2.ConnectError as error:
                problem = f"{address} port {port}: {error}"
            else:
                return BoundedStream(stream)
        self._resolver.forget(host)
        raise Unreachable(problem)


class BoundedStream(httpcore2.NetworkStream):
    """A connection that may serve one call after another, and never outlasts the one that it serves."""

    def __init__(self, stream: httpcore2.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        try:
            data = self._stream.read(max_bytes, self._hold())
        except httpcore2.ReadTimeout:
            raise DeadlineExceeded("the time was up while the answer was awaited") from None
        except httpcore2.ReadError as error:
            current_call().remaining()  # a cancelled call's connection was shut down on purpose
            raise ConnectionLost(str(error) or type(error).__name__) from None
        if not data:
            current_call().remaining()  # which looks like the end of an answer, too
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        try:
            self._stream.write(buffer, self._hold())
        except httpcore2.WriteTimeout:
            raise DeadlineExceeded("the time was up while the request was sent") from None

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        try:
            return BoundedStream(self._stream.start_tls(ssl_context, server_hostname, self._hold()))
        except httpcore2.ConnectTimeout:
            raise DeadlineExceeded("the time was up during the TLS handshake") from None
        except httpcore2.ConnectError as error:
            raise Unreachable(f"TLS handshake with {server_hostname} failed: {error}") from None
        finally:
            current_call().release()

    def close(self) -> None:
        self._stream.close()

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)

    def _hold(self) -> float:
        return current_call().hold(self._stream.get_extra_info("socket"))
