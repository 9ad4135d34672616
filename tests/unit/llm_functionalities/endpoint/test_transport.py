"""HTTP whose every wait is bounded, against real sockets."""

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx2
import pytest

from llm_functionalities.endpoint.call import Call, Deadline, working_on
from llm_functionalities.endpoint.resolver import Resolver
from llm_functionalities.endpoint.transport import (
    BYTES_PER_LINE,
    LONGEST_HEAD,
    BoundedBackend,
    BoundedStream,
    BoundedTransport,
)
from llm_functionalities.errors import BadResponse, Cancelled, ConnectionLost, DeadlineExceeded, Unreachable, Unread
from tests.fakes.model_server import ModelServer
from tests.fakes.name_server import NameServer
from tests.timing import on_a_busy_machine, until
from tests.unit.llm_functionalities.conftest import MAX_RESPONSE_BYTES


def post(http: httpx2.Client, url: str, seconds: float = 5) -> httpx2.Response:
    with working_on(Call(Deadline.after(seconds))):
        return http.post(f"{url}/generate", json={"inputs": "hello"})


def transport(resolver: Resolver, connect_timeout: float) -> BoundedTransport:
    return BoundedTransport(BoundedBackend(resolver, connect_timeout, 1), None, MAX_RESPONSE_BYTES)


def test_connections_are_used_again(http: httpx2.Client, server: ModelServer) -> None:
    for _ in range(3):
        assert post(http, server.url).json() == {"generated_text": "a fine answer"}
    assert server.connections == 1


@pytest.mark.parametrize("fault", ["hang", "trickle"])
@on_a_busy_machine
def test_no_number_of_short_waits_outlasts_the_deadline(fault: str, http: httpx2.Client, server: ModelServer) -> None:
    server.fault = fault
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        post(http, server.url, 0.3)
    assert 0.25 < time.monotonic() - started < 2


def test_a_call_can_be_cancelled_while_it_waits(http: httpx2.Client, server: ModelServer) -> None:
    server.fault = "hang"
    call = Call(Deadline.after(30))
    threading.Timer(0.1, call.cancel).start()
    with working_on(call), pytest.raises(Cancelled):
        http.get(f"{server.url}/health")


def test_a_call_can_be_cancelled_during_the_tls_handshake() -> None:
    call = Call(Deadline.after(10))
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as accepted:

        def hang() -> None:
            connection = accepted.enter_context(listener.accept()[0])
            connection.recv(1)
            call.cancel()

        threading.Thread(target=hang).start()
        http = accepted.enter_context(httpx2.Client(transport=transport(Resolver(), connect_timeout=10)))
        with working_on(call), pytest.raises(Cancelled):
            http.get(f"https://127.0.0.1:{listener.getsockname()[1]}/health")


def test_a_tls_handshake_is_given_up_after_the_time_to_connect() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        httpx2.Client(transport=transport(Resolver(), connect_timeout=0.1)) as http,
        pytest.raises(Unreachable, match=r"no TLS handshake with 127\.0\.0\.1 within 0\.1 s"),
    ):
        post(http, f"https://127.0.0.1:{listener.getsockname()[1]}")


def test_a_response_without_end_is_refused(http: httpx2.Client, server: ModelServer) -> None:
    server.fault = "endless"
    with pytest.raises(BadResponse, match="longer than 50000 bytes"):
        post(http, server.url)


@pytest.mark.parametrize("status", [b"100 Continue", b"103 Early Hints"])
def test_responses_before_the_response_are_bounded(status: bytes, http: httpx2.Client) -> None:
    interim = b"HTTP/1.1 " + status + b"\r\n\r\n"
    sent = 0

    def forever(connection: socket.socket) -> None:
        nonlocal sent
        read_request(connection)
        with suppress(OSError):
            while sent < 50 * LONGEST_HEAD:
                connection.sendall(interim * 100)
                sent += len(interim) * 100

    def some(connection: socket.socket) -> None:
        read_request(connection)
        connection.sendall(interim * 100 + RESPONSE)

    with serving(forever, some) as url:
        with pytest.raises(BadResponse, match=f"no response within the first {LONGEST_HEAD} bytes"):
            post(http, url)
        assert post(http, url).status_code == 200
    assert sent < 50 * LONGEST_HEAD


def test_a_response_of_very_many_lines_is_refused(http: httpx2.Client, server: ModelServer) -> None:
    server.raw = b"\n" * (MAX_RESPONSE_BYTES // BYTES_PER_LINE)
    assert post(http, server.url).is_success
    server.raw += b"\n"
    with pytest.raises(BadResponse, match=f"more than {MAX_RESPONSE_BYTES // BYTES_PER_LINE} lines"):
        post(http, server.url)


def test_a_name_that_moves_is_followed_although_its_old_server_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_functionalities.endpoint.transport.CONNECTION_SECONDS", 0.5)
    monkeypatch.setattr("llm_functionalities.endpoint.resolver.LONGEST_MEMORY_SECONDS", 0.0)
    with (
        ModelServer(host="127.0.0.2") as old,
        ModelServer(port=old.port, host="127.0.0.3") as new,
        NameServer({"tgi.": [("A", "127.0.0.2")]}) as names,
        httpx2.Client(transport=transport(Resolver(servers=[names.address]), connect_timeout=1.0)) as http,
    ):

        def moved() -> bool:
            post(http, f"http://tgi.:{old.port}")
            return bool(new.requests)

        assert not moved()
        names.records["tgi."] = [("A", "127.0.0.3")]
        until(moved, seconds=10)
        assert old.connections == 1


def test_a_port_that_nobody_listens_on_is_unreachable(http: httpx2.Client, free_port: Callable[[], int]) -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1 port"):
        post(http, f"http://127.0.0.1:{free_port()}")


@contextmanager
def silent_host(host: str, port: int) -> Iterator[None]:
    """Makes `host` answer no SYN: a listener whose backlog is full stands for a host that is gone."""
    with ExitStack() as blocked:
        listener = blocked.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(3):
            filler = blocked.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((host, port))
        yield


def test_an_address_that_does_not_answer_leaves_time_for_the_next_one() -> None:
    addresses = {"tgi.": [("A", "127.0.0.2"), ("A", "127.0.0.3")]}
    with (
        ModelServer(host="127.0.0.3") as server,
        silent_host("127.0.0.2", server.port),
        NameServer(addresses) as names,
        httpx2.Client(transport=transport(Resolver(servers=[names.address]), connect_timeout=1.0)) as http,
    ):

        def answered() -> bool:
            try:
                return post(http, f"http://tgi.:{server.port}", seconds=1).is_success
            except DeadlineExceeded:
                return False

        until(answered)


RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@contextmanager
def serving(*connections: Callable[[socket.socket], None]) -> Iterator[str]:
    """Starts a server that serves each connection by the next function, and closes it. Yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for each in connections:
                connection, _ = listener.accept()
                with connection:
                    each(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def read_request(connection: socket.socket) -> None:
    received = b""
    while not received.endswith(b'{"inputs":"hello"}'):
        received += connection.recv(65536)


def answer(connection: socket.socket) -> None:
    read_request(connection)
    connection.sendall(RESPONSE)


def close_unread(connection: socket.socket) -> None:
    connection.recv(1, socket.MSG_PEEK)


def answer_once_and_close_unread(connection: socket.socket) -> None:
    answer(connection)
    close_unread(connection)


def test_what_a_server_has_not_read_is_sent_again(http: httpx2.Client) -> None:
    with serving(answer_once_and_close_unread, close_unread, answer) as url:
        assert [post(http, url).status_code for _ in range(2)] == [200, 200]


def test_what_no_attempt_gets_read_is_unread(http: httpx2.Client) -> None:
    with serving(close_unread, close_unread, close_unread) as url:
        call = Call(Deadline.after(5))
        with working_on(call), pytest.raises(Unread):
            http.post(f"{url}/generate", json={"inputs": "hello"})
        assert not call.sent


def test_what_a_server_has_read_is_not_sent_again(http: httpx2.Client) -> None:
    with serving(read_request) as url, pytest.raises(ConnectionLost):
        post(http, url)


def test_a_connection_that_was_closed_before_the_request_came_is_known_by_its_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        backend = BoundedBackend(Resolver(), 1.0, 1)
        with working_on(Call(Deadline.after(5))):
            stream = backend.connect_tcp("127.0.0.1", listener.getsockname()[1])
            assert isinstance(stream, BoundedStream)
            listener.accept()[0].close()
            until(lambda: bool(stream.get_extra_info("is_readable")))
            stream.write(b"a request")
            with pytest.raises(Unread):
                stream.read(100)
            stream.close()


@contextmanager
def responding_once(response: bytes) -> Iterator[str]:
    """Starts a server whose only response is this one. Yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(response)

        threading.Thread(target=respond).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_redirect_is_not_followed(http: httpx2.Client) -> None:
    response = b"HTTP/1.1 302 Found\r\nlocation: http://example.com/\r\ncontent-length: 0\r\n\r\n"
    with responding_once(response) as url, pytest.raises(BadResponse, match=r"302.* http://example.com/"):
        post(http, url)


def test_a_compressed_response_is_refused(http: httpx2.Client, server: ModelServer) -> None:
    body = gzip.compress(b"a" * 1_000_000)
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with responding_once(head + body) as url, pytest.raises(BadResponse, match="encoded as gzip"):
        post(http, url)
    post(http, server.url)
    assert server.requests[0].headers["accept-encoding"] == "identity"
