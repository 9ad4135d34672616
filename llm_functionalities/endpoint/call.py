"""One request to a model server: its deadline, and the means to end it from another thread."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from llm_functionalities.errors import BadResponse, Cancelled, DeadlineExceeded, ModelError

# The response leaves this long before the caller's own gRPC deadline, so that it still arrives,
CALLER_MARGIN_SECONDS = 0.05

# but no earlier than with this share of a short deadline left.
CALLER_MARGIN_SHARE = 0.2

# Names a request in the metadata of calls, the headers of requests to endpoints, and the log of both.
REQUEST_ID = "x-request-id"


@dataclass(frozen=True)
class Deadline:
    """A point in time by which a call has its response. `at` is on the clock of `time.monotonic()`, in seconds."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        return cls(time.monotonic() + seconds)

    @classmethod
    def of_request(
        cls, timeout_ms: int, caller_seconds: float | None, default_seconds: float, longest_seconds: float
    ) -> "Deadline":
        """Returns the sooner of the request's `timeout_ms` and the caller's gRPC deadline; the default without them.

        `caller_seconds` is what is left of the caller's gRPC deadline; the response has to leave a little before it.
        No call gets more than `longest_seconds`.
        """
        limits = []
        if timeout_ms > 0:
            limits.append(timeout_ms / 1000)
        if caller_seconds is not None:
            margin = min(CALLER_MARGIN_SECONDS, CALLER_MARGIN_SHARE * caller_seconds)
            limits.append(max(0.0, caller_seconds - margin))
        return cls.after(min(longest_seconds, *limits) if limits else default_seconds)

    def remaining(self) -> float:
        """Returns the seconds that are left: zero or less once it has passed."""
        return self.at - time.monotonic()

    def within(self, seconds: float) -> "Deadline":
        """Returns the sooner of this deadline and one `seconds` from now."""
        return Deadline(min(self.at, time.monotonic() + seconds))


class Call:
    """Bounds everything that its worker thread does on the network.

    Every wait of the worker (name resolution, connecting, each read and write) asks `remaining()` first, so no sum
    of short waits outlasts the deadline. `cancel` and `expire` may come from any thread: they shut the socket down
    under the worker, which ends its read at once and tells the model server to stop generating.
    """

    def __init__(
        self, deadline: Deadline, headers: Mapping[str, str] | None = None, due: Deadline | None = None
    ) -> None:
        """deadline: ends everything. due: by when the caller needs the answer, if that is sooner."""
        self.deadline = deadline
        self.due = due or deadline
        self.headers = dict(headers or {})
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._end: type[ModelError] = DeadlineExceeded
        self._socket: socket.socket | None = None
        # True once a byte of the request has been sent.
        self.sent = False
        # Of the response; None before it has come.
        self.response_headers: Mapping[str, str] | None = None
        # True if an endpoint is to be tried although it was away a moment ago.
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
        """Returns the seconds that are left: more than zero.

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
        """Takes the connection out of reach of `cancel` and `expire`, because it may serve another call now."""
        with self._lock:
            self._socket = None

    def cancel(self) -> None:
        """Ends the call because its caller has gone. Safe from any thread, more than once, and after its end."""
        self._end_by(Cancelled)

    def expire(self) -> None:
        """Ends the call because its time is up. Safe from any thread, more than once, and after its end."""
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
    # SSLSocket.shutdown drops its TLS state under the thread that reads; the plain socket's shutdown does not.
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already, which is what was wanted


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
