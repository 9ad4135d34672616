"""One request to a model server: how long it may last, and the means to end it from another thread."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from llm_functionalities.deadline import Deadline
from llm_functionalities.errors import BadAnswer, Cancelled, DeadlineExceeded, ModelError


class Call:
    """Bounds everything that its worker thread does on the network.

    Every wait of the worker (name resolution, connecting, each read and write) asks `remaining()` first, so no sum
    of short waits outlasts the deadline. `cancel` and `expire` may come from any thread: they shut the socket down
    under the worker, which ends its read at once and tells the model server to stop generating.
    """

    def __init__(self, deadline: Deadline, headers: Mapping[str, str] | None = None) -> None:
        self.deadline = deadline
        self.headers = dict(headers or {})
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._end: type[ModelError] = DeadlineExceeded
        self._socket: socket.socket | None = None
        self._sent = False

    def remaining(self) -> float:
        """Seconds that are left, more than zero.

        Raises:
            DeadlineExceeded: the time is up.
            Cancelled: the caller has gone.
        """
        seconds = self.deadline.remaining()
        if self._ended.is_set() or seconds <= 0:
            raise self._end("the caller has gone" if self._end is Cancelled else "the time was up")
        return seconds

    def pause(self, seconds: float) -> None:
        """Waits, though not past the deadline or a cancellation. Raises as `remaining` does."""
        self._ended.wait(min(seconds, self.remaining()))
        self.remaining()

    def send_once(self) -> None:
        """Marks the request as sent. Raises BadAnswer when it was sent before: a generation is never sent twice."""
        if self._sent:
            raise BadAnswer("the endpoint's answer asks for the request to be sent again")
        self._sent = True

    def refused(self) -> None:
        """The endpoint refused the request and generated nothing: another may be sent in its place."""
        self._sent = False

    def hold(self, connection: socket.socket) -> float:
        """The worker is about to use `connection`, which `cancel` and `expire` may shut down until `release`.

        Returns what is left of the call's time, in seconds. Raises as `remaining` does.
        """
        with self._lock:
            self._socket = connection
        return self.remaining()

    def release(self) -> None:
        """The worker has done with its connection; from here on it may serve another call."""
        with self._lock:
            self._socket = None

    def cancel(self) -> None:
        """Ends the call as its caller has gone. Safe from any thread, more than once, and after the call has ended."""
        self._end_by(Cancelled)

    def expire(self) -> None:
        """Ends the call as its time is up. As safe as `cancel`."""
        self._end_by(DeadlineExceeded)

    def _end_by(self, error: type[ModelError]) -> None:
        with self._lock:
            if not self._ended.is_set():
                self._end = error
                self._ended.set()
            if self._socket is not None:
                _shut_down(self._socket)


def _shut_down(connection: socket.socket) -> None:
    # SSLSocket.shutdown drops its TLS state under the thread that reads; the plain socket's shutdown does not.
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        return  # it is closed already, which is what was wanted


_current: ContextVar[Call] = ContextVar("current_call")


def current_call() -> Call:
    """The call that this thread works on. Raises LookupError outside of `working_on`."""
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
