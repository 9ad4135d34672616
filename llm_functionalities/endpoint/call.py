"""One request to a model server: its deadline, and how to end it from another thread."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from llm_functionalities.errors import BadResponse, Cancelled, DeadlineExceeded, ModelError

# The response is sent this many seconds before the caller's gRPC deadline, so that it arrives in time,
CALLER_MARGIN_SECONDS = 0.05
# but at most this share of a short deadline before it.
CALLER_MARGIN_SHARE = 0.2

# Name of the request id in the metadata of calls, the headers of requests to endpoints, and the logs of both.
REQUEST_ID = "x-request-id"


@dataclass(frozen=True)
class Deadline:
    """The time by which a call must have its response. at: seconds on the clock of `time.monotonic()`."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        return cls(time.monotonic() + seconds)

    @classmethod
    def of_request(
        cls, timeout_ms: int, caller_seconds: float | None, default_seconds: float, longest_seconds: float
    ) -> "Deadline":
        """Returns the sooner of the request's `timeout_ms` and the caller's gRPC deadline; the default without both.

        caller_seconds: seconds until the caller's gRPC deadline, before which the response has to be sent. No call gets
        more than `longest_seconds`.
        """
        limits = []
        if timeout_ms > 0:
            limits.append(timeout_ms / 1000)
        if caller_seconds is not None:
            margin = min(CALLER_MARGIN_SECONDS, CALLER_MARGIN_SHARE * caller_seconds)
            limits.append(max(0.0, caller_seconds - margin))
        return cls.after(min(longest_seconds, *limits) if limits else default_seconds)

    def remaining(self) -> float:
        """Returns the seconds until the deadline: zero or less once it has passed."""
        return self.at - time.monotonic()

    def within(self, seconds: float) -> "Deadline":
        """Returns the sooner of this deadline and one `seconds` from now."""
        return Deadline(min(self.at, time.monotonic() + seconds))


class Call:
    """Limits the time of everything that its worker thread does on the network.

    Every wait of the worker (name resolution, connecting, each read and write) asks `remaining()` first, so that many
    short waits do not exceed the deadline. `cancel` and `expire` are thread-safe: they shut down the worker's socket,
    which ends its read at once and makes the model server stop generating.
    """

    def __init__(
        self, deadline: Deadline, headers: Mapping[str, str] | None = None, due: Deadline | None = None
    ) -> None:
        """deadline: ends the call. due: time by which the caller needs the answer, if that is sooner."""
        self.deadline = deadline
        self.due = due or deadline
        self.headers = dict(headers or {})
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._end: type[ModelError] = DeadlineExceeded
        self._socket: socket.socket | None = None
        # True once a byte of the request has been sent.
        self.sent = False
        # Headers of the response; None before it has come.
        self.response_headers: Mapping[str, str] | None = None
        # True if an endpoint is tried although its circuit is open.
        self.insists = False
        # Names of the endpoints that were tried.
        self.tried: set[str] = set()
        self._attempts: list[Call] = []

    def attempt(self) -> "Call":
        """Returns a new call that ends with this one at the latest."""
        attempt = Call(self.deadline, self.headers, self.due)
        with self._lock:
            self._attempts.append(attempt)
            if self._ended.is_set():
                attempt._end_by(self._end)
        return attempt

    def remaining(self) -> float:
        """Returns the seconds until the deadline, more than zero.

        Raises:
            DeadlineExceeded: the time is up.
            Cancelled: the call was cancelled.
        """
        seconds = self.deadline.remaining()
        if self._ended.is_set() or seconds <= 0:
            raise self._end("the call was cancelled" if self._end is Cancelled else "the deadline passed")
        return seconds

    def pause(self, seconds: float) -> None:
        """Waits, but not past the deadline or a cancellation. Raises DeadlineExceeded or Cancelled."""
        self._ended.wait(min(seconds, self.remaining()))
        self.remaining()

    def check_unsent(self) -> None:
        """Raises BadResponse if the request was sent before: no request is sent to an endpoint twice."""
        if self.sent:
            raise BadResponse("the endpoint's response asks for the request to be sent again")
        self.response_headers = None

    def allow_another(self) -> None:
        """Allows another request instead of one for which nothing was generated."""
        self.sent = False

    def hold(self, connection: socket.socket) -> float:
        """Lets `cancel` and `expire` shut down `connection`, which the worker is about to use, until `release`.

        Returns the seconds that are left of the call's time. Raises DeadlineExceeded or Cancelled.
        """
        with self._lock:
            self._socket = connection
        return self.remaining()

    def release(self) -> None:
        """Protects the connection from `cancel` and `expire`, because it may serve another call now."""
        with self._lock:
            self._socket = None

    def cancel(self) -> None:
        """Ends the call because its caller is gone. Thread-safe; may be called more than once, and after the end."""
        self._end_by(Cancelled)

    def expire(self) -> None:
        """Ends the call because its time is up. Thread-safe; may be called more than once, and after the end."""
        self._end_by(DeadlineExceeded)

    def _end_by(self, error: type[ModelError]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._end = error
                self._ended.set()
            if self._socket is not None:
                _shut_down(self._socket)
            for attempt in self._attempts:
                attempt._end_by(error)


def _shut_down(connection: socket.socket) -> None:
    # SSLSocket.shutdown would drop the TLS state that the reading thread uses; the plain socket's shutdown does not.
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already


_current: ContextVar[Call] = ContextVar("current_call")


def current_call() -> Call:
    """Returns the call that this thread works on. Raises LookupError outside of `working_on`."""
    return _current.get()


@contextmanager
def working_on(call: Call) -> Iterator[None]:
    """Makes `call` the current one of this thread."""
    token = _current.set(call)
    try:
        yield
    finally:
        call.release()
        _current.reset(token)
