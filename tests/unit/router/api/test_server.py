"""The server says at once when it cannot listen, ends in two steps, and goes on when a client cannot be taken in."""

import asyncio
import contextlib
import errno
import gc
import socket

import pytest
import uvicorn
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tests.fakes.router_service import RouterService
from tests.timing import eventually
from tgi_server.router.api.access import AccessRules
from tgi_server.router.api.admission import Admission
from tgi_server.router.api.app import create_app
from tgi_server.router.api.connections import ClientConnection, Connections
from tgi_server.router.api.server import Acceptor, HttpServer, drain, listen, reserve
from tgi_server.router.errors import StartupError
from tgi_server.router.text.token_stream import TokenStream


def test_a_port_in_use_is_told_with_its_flag():
    with reserve("127.0.0.1", 0, "--port") as free:
        port = free.getsockname()[1]
    with reserve("127.0.0.1", port, "--port") as listener:
        with pytest.raises(StartupError, match=rf"^cannot listen on 127\.0\.0\.1:{port} \(--port\): "):
            reserve("127.0.0.1", port, "--port")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        listen([listener])
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(StartupError, match=rf"^cannot listen on 127\.0\.0\.1:{port} \(--port\): "):
            reserve("127.0.0.1", port, "--port")
    reserve("127.0.0.1", port, "--port").close()


def test_a_port_that_another_server_takes_after_all_is_told():
    with (
        reserve("127.0.0.1", 0, "--port") as listener,
        socket.create_server(("", listener.getsockname()[1])),
        pytest.raises(StartupError, match=r"^cannot listen on 127\.0\.0\.1:\d+: "),
    ):
        listen([listener])


def test_an_unknown_host_name_is_told_with_its_flag():
    with pytest.raises(StartupError, match=r"^cannot listen on 'no such host' \(--hostname\): "):
        reserve("no such host", 0, "--port")


def test_a_second_signal_breaks_the_drain_off():
    servers = [uvicorn.Server(uvicorn.Config(app="")) for _ in range(2)]
    drain(servers)
    assert [(each.should_exit, each.force_exit) for each in servers] == [(True, False)] * 2
    drain(servers)
    assert [each.force_exit for each in servers] == [True, True]


# What the server uses of uvicorn beside its documented interface.
INTERNALS = {
    uvicorn.Server: "serve startup shutdown capture_signals",
    HttpToolsProtocol: "connection_made connection_lost data_received on_message_begin on_header on_headers_complete "
    "on_body on_message_complete on_response_complete pause_writing resume_writing send_400_response shutdown",
    "server": "config server_state servers started should_exit force_exit",
    "connection": "transport cycle flow parser headers url scope loop logger timeout_keep_alive",
    "flow": "read_paused pause_reading resume_reading",
    "cycle": "body response_started response_complete more_body keep_alive disconnected message_event on_response",
}


@pytest.mark.parametrize(("part", "name"), [(part, name) for part in INTERNALS for name in INTERNALS[part].split()])
async def test_uvicorn_has_what_the_server_uses_of_it(part: str | type, name: str):
    if isinstance(part, type):
        assert callable(getattr(part, name, None)), f"uvicorn {uvicorn.__version__}: {part.__name__}.{name} is gone"
        return
    server = uvicorn.Server(uvicorn.Config(respond, http=HttpToolsProtocol, ws="none", lifespan="off", log_config=None))
    server.config.load()
    server.servers = []
    connection = HttpToolsProtocol(server.config, server.server_state, {})
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: connection, "127.0.0.1", 0) as listener:
        reader, writer = await asyncio.open_connection(*listener.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
        assert (await reader.readline()) == b"HTTP/1.1 200 OK\r\n"
        parts = {"server": server, "connection": connection, "flow": connection.flow, "cycle": connection.cycle}
        assert hasattr(parts[part], name), f"uvicorn {uvicorn.__version__}: {part}.{name} is gone"
        writer.close()


class Listener:
    """A listening socket whose next attempts to accept fail with these errors."""

    def __init__(self, *errors: OSError) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.errors = list(errors)
        self.address = self._socket.getsockname()

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        if self.errors:
            raise self.errors.pop(0)
        return self._socket.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._socket, name)


async def respond(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends an empty response."""
    await Response()(scope, receive, send)


def acceptor(listener: Listener, connections: Connections, app: ASGIApp = respond) -> Acceptor:
    server = HttpServer(app, 1.0, 5, connections)
    server.config.load()

    def connection() -> ClientConnection:
        return ClientConnection(server.config, server.server_state, app_state={})

    return Acceptor(listener, connection, connections)  # type: ignore[arg-type]


async def first_line(address: tuple[str, int]) -> bytes:
    """Sends a request and returns the first line of the response; empty if the connection ends without one."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
    try:
        return await asyncio.wait_for(reader.readline(), 5)
    finally:
        writer.close()


async def test_a_process_without_open_files_left_takes_clients_in_a_little_later(caplog: pytest.LogCaptureFixture):
    listener = Listener(OSError(errno.EMFILE, "Too many open files"), ConnectionAbortedError())
    accepting = acceptor(listener, Connections(8, 8))
    try:
        assert await first_line(listener.address) == b"HTTP/1.1 200 OK\r\n"
        assert "connections are refused: Too many open files (ulimit -n)" in caplog.messages
        assert not listener.errors
    finally:
        accepting.close()


async def test_a_client_too_many_is_told_so():
    asked, answer = asyncio.Event(), asyncio.Event()

    async def respond_late(scope: Scope, receive: Receive, send: Send) -> None:
        asked.set()
        await answer.wait()
        await respond(scope, receive, send)

    listener = Listener()
    connections = Connections(1, 1)
    accepting = acceptor(listener, connections, respond_late)
    try:
        first = asyncio.ensure_future(first_line(listener.address))
        await asked.wait()
        assert await first_line(listener.address) == b"HTTP/1.1 429 Too Many Requests\r\n"
        assert len(connections) == 1
        answer.set()
        assert await first == b"HTTP/1.1 200 OK\r\n"
    finally:
        accepting.close()


async def test_clients_may_take_longer_than_the_system_waits_before_it_asks_for_them():
    listener = reserve("127.0.0.1", 0, "--port")
    listen([listener])
    address = listener.getsockname()
    server = HttpServer(respond, 1.0, 100_000, Connections(8, 8))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        assert await first_line(address) == b"HTTP/1.1 200 OK\r\n"
    finally:
        server.should_exit = True
        await serving


async def test_clients_that_the_system_has_accepted_are_answered_before_the_end():
    listener = reserve("127.0.0.1", 0, "--port")
    listen([listener])
    server = HttpServer(respond, 5.0, 75, Connections(64, 64))
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([listener])
    address = listener.getsockname()
    with contextlib.ExitStack() as stack:
        *clients, silent = (stack.enter_context(socket.create_connection(address, 5)) for _ in range(25))
        for client in clients:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await server.shutdown([listener])
        for client in clients:
            assert client.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
        assert silent.recv(100) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


def requests_in_memory() -> list[Admission | TokenStream]:
    return [found for found in gc.get_objects() if isinstance(found, Admission | TokenStream)]


@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_an_answered_request_is_freed_without_the_garbage_collector(router: RouterService, path: str):
    listener = Listener()
    accepting = acceptor(listener, Connections(8, 8), create_app(router.service, AccessRules()))
    gc.collect()
    earlier = requests_in_memory()  # of other tests
    gc.disable()
    try:
        reader, writer = await asyncio.open_connection(*listener.address)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 19\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + b'{"inputs": "hello"}')
        assert b'"generated_text":"hello world"' in await reader.read()
        writer.close()
        await eventually(lambda: len(requests_in_memory()) == len(earlier))
    finally:
        gc.enable()
        accepting.close()


@pytest.mark.parametrize(("method", "body"), [("GET", b"hello"), ("HEAD", b"")])
async def test_a_response_to_head_has_no_body(method: str, body: bytes):
    async def greet(scope: Scope, receive: Receive, send: Send) -> None:
        await Response(b"hello")(scope, receive, send)

    listener = Listener()
    accepting = acceptor(listener, Connections(8, 8), greet)
    try:
        reader, writer = await asyncio.open_connection(*listener.address)
        for _ in range(2):
            writer.write(f"{method} / HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"
            assert await reader.readexactly(len(body)) == body
        writer.close()
    finally:
        accepting.close()


async def test_a_closed_acceptor_takes_nobody_in():
    listener = Listener()
    accepting = acceptor(listener, Connections(8, 8))
    accepting.close()
    accepting.close()
    await accepting.wait_closed()
    with pytest.raises(ConnectionRefusedError):
        await first_line(listener.address)
