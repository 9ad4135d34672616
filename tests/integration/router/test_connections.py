"""Clients that stop halfway: in their request, or in reading the answer."""

import asyncio
import json
import logging
import re
import resource
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import psutil
import pytest
import uvloop

from tests.conftest import FreePort
from tests.integration.router.conftest import Router, RouterFactory
from tests.integration.router.process import Start
from tgi_server.router.api import connections
from tgi_server.router.api.memory import memory_full
from tgi_server.router.errors import StartupError

HEAD = b"POST /generate HTTP/1.1\r\nhost: here\r\ncontent-length: 19\r\n\r\n"
BODY = b'{"inputs": "Hello"}'
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
BUSY = connections.refusal(memory_full())
BEGINNINGS = {
    "nothing": b"",
    "half a head": HEAD[:30],
    "no body": HEAD,
    "half a body": HEAD + BODY[:7],
    "a second request": HEAD + BODY + HEAD + BODY[:7],
}
LONG: dict[str, Any] = {"ignore_eos": True, "top_n_tokens": 5}
MUCH = {"max_total_tokens": 30_000}

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The event loop that routers have."""
    return uvloop.EventLoopPolicy()


@asynccontextmanager
async def connection(router: Router) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Returns the bytes that come before the server ends the connection."""
    received = b""
    async with asyncio.timeout(10):
        try:
            while piece := await reader.read(65_536):
                received += piece
        except ConnectionResetError:
            pass
    return received


async def test_who_does_not_go_on_is_not_waited_for(routers: RouterFactory):
    router = await routers(client_timeout=1)

    async def begin(beginning: bytes) -> bytes:
        async with connection(router) as (reader, writer):
            writer.write(beginning)
            return await ended(reader)

    answers = await asyncio.gather(*map(begin, BEGINNINGS.values()))
    assert [answer.count(b"HTTP/1.1 200") for answer in answers] == [0, 0, 0, 0, 1]
    await router.idle()


async def trickle(router: Router, beginning: bytes, drop: bytes) -> bytes:
    """Sends `drop` again and again, and gives back what came until the server ended the connection."""
    async with connection(router) as (reader, writer):
        writer.write(beginning)
        receiving = asyncio.create_task(ended(reader))
        while not receiving.done():
            writer.write(drop)
            await asyncio.sleep(0.2)
        return await receiving


TRICKLES = {
    "a head": (b"POST /generate HTTP/1.1\r\nx-header: ", b"x"),
    "headers": (b"POST /generate HTTP/1.1\r\n", b"x: y\r\n"),
    "a body": (HEAD.replace(b"19", b"1900"), b" "),
    "lines before a request": (b"", b"\r\n"),
    "lines after a request": (HEAD + BODY, b"\r\n"),
    "a second request": (HEAD + BODY + HEAD.replace(b"19", b"1900"), b" "),
    "the body of a request that is refused": (HEAD.replace(b"/generate", b"/absent").replace(b"19", b"1900"), b" "),
}


# The first goes by default: the others wait as long.
@pytest.mark.parametrize(
    "name", ["a head", *(pytest.param(name, marks=pytest.mark.slow) for name in TRICKLES if name != "a head")]
)
async def test_bytes_that_trickle_in_put_nothing_off(routers: RouterFactory, name: str):
    router = await routers(client_timeout=1)
    answered = await trickle(router, *TRICKLES[name])
    assert (b"HTTP/1.1 " in answered) == ("request" in name.replace("before a request", ""))
    await router.idle()
    await router.until(lambda: len(router.connections) == 1)  # the test's own


async def test_who_waits_for_a_long_answer_may_wait(routers: RouterFactory):
    router = await routers(client_timeout=2, shard={"step_seconds": 0.5})
    router.say("Rinse the rice. Then boil it.", end=False)
    async with connection(router) as (reader, writer):
        body = b'{"inputs": "Hello", "parameters": {"max_new_tokens": 5}}'
        head = HEAD.replace(b"19", str(len(body)).encode())
        for part in (head[:20], head[20:], body[:9], body[9:]):
            writer.write(part)
            await asyncio.sleep(0.1)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_requests_that_are_not_whole_take_no_place(routers: RouterFactory):
    router = await routers(max_concurrent_requests=1)
    async with connection(router) as (first, one), connection(router) as (_, other):
        for writer in (one, other):
            writer.write(HEAD + BODY[:7])
        await router.until(lambda: _requests(router, 2))
        assert (await router.post("/generate", inputs="Hello")).status_code == 200
        one.write(BODY[7:])
        assert (await first.readline()).startswith(b"HTTP/1.1 200")


async def _requests(router: Router, count: int) -> bool:
    return await router.metric("tgi_request_count") == count


def reset(client: socket.socket) -> None:
    """Ends the connection at once: the other side gets a reset, not an end."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


GARBAGE = bytes(range(128, 256))


@pytest.mark.parametrize("leave", [reset, socket.socket.close, lambda client: client.shutdown(socket.SHUT_WR)])
@pytest.mark.parametrize("sent", [b"", HEAD[:30], HEAD, HEAD + BODY[:7], HEAD + BODY, HEAD + BODY + HEAD, GARBAGE])
async def test_clients_that_leave_at_any_moment_leave_no_fault_in_the_log(
    router: Router, caplog: pytest.LogCaptureFixture, sent: bytes, leave: Callable[[socket.socket], None]
):
    host, port = router.url.removeprefix("http://").split(":")
    clients = []
    for number in range(30):
        clients.append(client := socket.socket())
        client.connect((host, int(port)))  # the event loop, which would accept, stands still
        client.sendall(sent)
        if number % 3:
            await asyncio.sleep(0.001 * (number % 3))
        leave(client)
    await router.until(lambda: len(router.connections) <= 1)
    for client in clients:
        client.close()
    await router.idle()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert (await router.post("/generate", inputs="Hello")).status_code == 200
    broken = sum([await router.metric(f'tgi_connections_broken_total{{by="{by}"}}') for by in ("client", "malformed")])
    assert broken <= 30
    assert broken > 0 or sent in (b"", HEAD + BODY)


async def test_a_head_without_an_end_is_refused(router: Router):
    async with connection(router) as (reader, writer):
        writer.write(HEAD.replace(b"\r\n\r\n", b"\r\n"))
        with pytest.raises(ConnectionError):
            await write_headers(writer, 1000)
        assert await ended(reader) in (b"", TOO_LARGE)
    assert (await router.post("/generate", inputs="Hello")).status_code == 200


UPGRADES = {
    "HTTP/2": b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n",
    "a WebSocket": b"Upgrade: websocket\r\nConnection: upgrade\r\nsec-websocket-version: 13\r\n",
}
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: here\r\n\r\n"
LAST = MODELS.replace(b"host", b"connection: close\r\nhost")


def wish(head: bytes, protocol: str) -> bytes:
    """Returns the head of a request that asks for another protocol, too."""
    return head.replace(b"host: here\r\n", b"host: here\r\n" + UPGRADES[protocol])


async def statuses(router: Router, *segments: bytes, close: bool = False) -> list[int]:
    """Returns the statuses of all responses to the segments, and to a last request after them, on one connection.

    close: the segments end the connection, and there is no last request.
    """
    async with connection(router) as (reader, writer):
        for segment in segments:
            writer.write(segment)
            await asyncio.sleep(0.02)  # the system shall not join them
        if not close:
            writer.write(LAST)
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", await ended(reader))]


@pytest.mark.parametrize("protocol", UPGRADES)
async def test_a_wish_for_another_protocol_is_passed_over(
    router: Router, protocol: str, caplog: pytest.LogCaptureFixture
):
    head = wish(HEAD, protocol)
    chunked = head.replace(b"content-length: 19", b"transfer-encoding: chunked")
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    assert await statuses(router, head + BODY) == [200, 200]
    assert await statuses(router, head, BODY) == [200, 200]
    assert await statuses(router, head[:70], head[70:] + BODY[:5], BODY[5:]) == [200, 200]
    assert await statuses(router, chunked + chunks) == [200, 200]
    assert await statuses(router, chunked, chunks[:9], chunks[9:]) == [200, 200]
    assert await statuses(router, (head + BODY) * 2 + chunked + chunks + wish(MODELS, protocol)) == [200] * 5
    assert await statuses(router, wish(LAST, protocol), close=True) == [200]
    assert await statuses(router, head.replace(b"host", b"connection: close\r\nhost") + BODY, close=True) == [200]
    # A machine that stands still for a moment is warned of, too.
    assert not [each for each in caplog.records if each.levelname == "WARNING" and each.name != "shared.event_loop"]


async def test_the_body_of_a_wish_for_another_protocol_is_no_request(router: Router):
    head = wish(HEAD, "HTTP/2").replace(b"19", str(len(MODELS)).encode())
    assert await statuses(router, head + MODELS) == [422, 200]
    assert await statuses(router, head, MODELS) == [422, 200]


async def test_nobody_is_connected_to_another_host(router: Router):
    assert await statuses(router, b"CONNECT here:80 HTTP/1.1\r\nhost: here\r\n\r\n" + MODELS, close=True) == [400]


async def write_headers(writer: asyncio.StreamWriter, count: int) -> None:
    for _ in range(count):
        writer.write(b"x-header: " + b"x" * 10_000 + b"\r\n")
        await writer.drain()


CHUNKED = HEAD.replace(b"content-length: 19", b"transfer-encoding: chunked")
LAST_CHUNK = b"13\r\n%b\r\n0\r\n" % BODY


async def test_trailers_count_as_a_head_does_and_change_nothing(routers: RouterFactory):
    router = await routers(api_key="k")
    key = b"authorization: Bearer k\r\n"
    trusted = CHUNKED.replace(b"\r\n\r\n", b"\r\n" + key + b"\r\n")
    field = b"x-field: " + b"x" * 5_991 + b"\r\n"
    assert await statuses(router, CHUNKED + LAST_CHUNK + key + b"\r\n") == [401, 200]
    assert await statuses(router, trusted + LAST_CHUNK + b"content-type: text/plain\r\n\r\n") == [200, 200]
    assert await statuses(router, trusted + LAST_CHUNK, *[field] * 9, b"\r\n") == [200, 200]
    for beginning, more in (
        (trusted + LAST_CHUNK, field),
        (trusted + LAST_CHUNK + b"x-field: ", b"x" * 6_000),
        (trusted + b"13;extension=", b"x" * 6_000),
    ):
        assert await statuses(router, beginning, *[more] * 11, close=True) == [431]
    assert await statuses(router, HEAD[:-2] + b"a: b\r\n" * 300 + b"\r\n", close=True) == [431]
    await router.idle()


async def test_requests_may_follow_at_once_and_come_in_any_pieces(router: Router):
    stream = HEAD + BODY + CHUNKED + LAST_CHUNK + b"a: b\r\n\r\n" + MODELS * 2 + CHUNKED + LAST_CHUNK + b"\r\n" + LAST
    for size in (1, 2, 3, 7, 50, 5_000):
        async with connection(router) as (reader, writer):
            for start in range(0, len(stream), size):
                writer.write(stream[start : start + size])
                await asyncio.sleep(0)
            assert re.findall(rb"HTTP/1\.1 (\d+) ", await ended(reader)) == [b"200"] * 6


async def test_nothing_runs_for_a_client_that_is_gone(routers: RouterFactory):
    """Neither its running request nor the requests that it has sent after that, however many."""
    router = await routers(shard={"step_seconds": 0.01})
    for behind in (BODY + HEAD, HEAD + BODY):
        async with connection(router) as (_, writer):
            writer.write(long_answer(2_000) + behind * 10_000)
            await router.until(lambda: router.service.capacity.in_flight == 1)
            await asyncio.sleep(0.1)
        await router.until(lambda: router.service.capacity.in_flight == 0, seconds=5)
        await router.idle()
    assert len(router.shard.received) == 2


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system cannot tell")
async def test_who_does_not_read_holds_up_nobody_and_is_not_waited_for(routers: RouterFactory):
    router = await routers(client_timeout=1, max_concurrent_requests=2, shard=MUCH)
    host, port = router.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(long_stream(20_000))
        await router.until(lambda: router.service.capacity.in_flight == 1)
        assert (await router.post("/generate", inputs="Hello")).status_code == 200
        await router.until(lambda: router.service.capacity.in_flight == 0, seconds=20)
    assert await router.metric('tgi_request_failure{err="cancelled"}') == 1


def long_stream(tokens: int) -> bytes:
    body = json.dumps({"inputs": "Hello", "parameters": LONG | {"max_new_tokens": tokens}}).encode()
    return b"POST /generate_stream HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % len(body) + body


@contextmanager
def hesitant_client(router: Router, request: bytes) -> Iterator[socket.socket]:
    """A client that has asked, and for whom the system keeps as little as it can."""
    host, port = router.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(request)
        client.setblocking(False)
        yield client


def long_answer(tokens: int, header: bytes = b"") -> bytes:
    body = json.dumps({"inputs": "Hello", "parameters": LONG | {"details": True, "max_new_tokens": tokens}}).encode()
    return b"POST /generate HTTP/1.1\r\nhost: here\r\n%scontent-length: %d\r\n\r\n" % (header, len(body)) + body


@pytest.mark.parametrize(
    ("request_", "outcome"),
    [
        pytest.param(long_stream(20_000), "cancelled", id="a stream"),
        pytest.param(long_answer(2000), None, id="a whole answer", marks=pytest.mark.slow),
        pytest.param(
            long_answer(2000, b"connection: close\r\n"),
            None,
            id="the last answer of a connection",
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_who_reads_slowly_is_not_waited_for(routers: RouterFactory, request_: bytes, outcome: str | None):
    router = await routers(client_timeout=1, shard=MUCH, send_buffer=4096)
    with hesitant_client(router, request_) as client:
        await router.until(lambda: router.service.capacity.in_flight == 1)

        async def read_a_little() -> bool:
            with suppress(BlockingIOError, ConnectionError):
                client.recv(1000)
            await asyncio.sleep(0.05)
            return not len(router.connections)

        await router.until(read_a_little, seconds=30)
    assert await router.metric('tgi_request_failure{err="cancelled"}') == (outcome is not None)


@pytest.mark.slow
async def test_what_waits_for_a_client_is_bounded(routers: RouterFactory, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    router = await routers(client_timeout=600, shard=MUCH)
    with hesitant_client(router, long_stream(20_000)):
        await router.until(lambda: router.service.capacity.in_flight == 1)
        await router.until(lambda: not len(router.connections), seconds=30)
    await router.until(lambda: "bytes of its answer unread" in caplog.text)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_place_is_free_when_the_last_token_is_there_though_nobody_reads_it(routers: RouterFactory):
    router = await routers(client_timeout=600, max_concurrent_requests=1, shard=MUCH, send_buffer=4096)
    with hesitant_client(router, long_stream(1000)):
        await router.until(lambda: router.service.capacity.in_flight == 1)
        await router.until(lambda: router.service.capacity.in_flight == 0, seconds=30)
        assert await router.metric("tgi_request_success") == 0
        assert (await router.post("/generate", inputs="Hello")).status_code == 200


async def test_what_waits_for_all_clients_is_bounded(routers: RouterFactory):
    router = await routers(client_timeout=600, max_client_memory=1, shard=MUCH, send_buffer=4096)
    with hesitant_client(router, long_answer(3000)):
        await router.until(lambda: router.service.capacity.in_flight == 1)
        await router.until(lambda: router.service.capacity.in_flight == 0, seconds=30)
    assert (await router.post("/generate", inputs="Hello")).status_code == 200


async def test_a_request_that_takes_too_much_memory_is_told_so(routers: RouterFactory):
    """In a response of its own, or as the last event of a stream; the connection serves on."""
    router = await routers(client_timeout=600, max_client_memory=1, shard=MUCH)
    async with connection(router) as (reader, writer):
        writer.write(long_answer(4000) + LAST)
        answers = await ended(reader)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", answers) == [b"429", b"200"]
    assert b"--max-client-memory" in answers
    logprobs = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 20, "n": 4}
    stream = await router.post("/v1/chat/completions", **logprobs, max_tokens=5000, ignore_eos=True, stream=True)
    assert stream.status_code == 200  # what was read is held no more
    await router.idle()


async def test_long_prompts_are_counted_as_what_they_take(routers: RouterFactory):
    """Not as their tokens would take in a response that shows them, which is eight times as much."""
    router = await routers(max_client_memory=16, shard={"step_seconds": 0.3, "max_total_tokens": 20_000})
    long = " ".join(["rice"] * 15_000)

    async def ask(number: int) -> httpx.Response:
        return await router.post("/generate", inputs=f"{number} {long}", parameters={"max_new_tokens": 2})

    answers = await asyncio.gather(*[ask(number) for number in range(6)])
    assert [answer.status_code for answer in answers] == [200] * 6


async def test_what_is_held_of_unfinished_requests_is_bounded(routers: RouterFactory):
    router = await routers(client_timeout=600, max_client_memory=3)
    head = HEAD.replace(b"19", b"1900000")
    async with connection(router) as (small, small_writer), connection(router) as (large, large_writer):
        async with connection(router) as (_, other_writer):
            for writer, size in ((small_writer, 1000), (large_writer, 1_800_000), (other_writer, 1_700_000)):
                writer.write(head + b" " * size)
            assert await ended(large) in (b"", BUSY)  # what was not read may take the words back
            await router.until(lambda: len(router.connections) == 2)
        assert not small.at_eof()
    assert (await router.post("/generate", inputs="Hello")).status_code == 200


async def test_idle_connections_give_way_first_and_the_oldest_of_them(routers: RouterFactory):
    router = await routers(max_connections_per_address=3, max_connections=8)
    await router.http.aclose()
    async with connection(router) as (old, old_writer), connection(router) as (half, _), connection(router) as (new, _):
        for writer in (old_writer,):
            writer.write(HEAD + BODY)
        await old.readuntil(b"}")
        async with connection(router) as (reader, writer):
            writer.write(HEAD + BODY)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert await ended(old) == b""
        assert not half.at_eof()
        assert not new.at_eof()


async def test_more_connections_of_one_address_are_told_so(routers: RouterFactory, caplog: pytest.LogCaptureFixture):
    router = await routers(max_connections_per_address=2, max_connections=8, shard={"step_seconds": 0.2})
    await router.http.aclose()
    async with connection(router) as (one, writer), connection(router) as (other, other_writer):
        for each in (writer, other_writer):
            each.write(HEAD + BODY)
        await router.until(lambda: router.service.capacity.in_flight == 2)
        async with connection(router) as (refused, refused_writer):
            refused_writer.write(HEAD + BODY)
            answered = await ended(refused)
        assert answered.startswith(b"HTTP/1.1 429 ")
        assert b'"error_type":"overloaded"' in answered
        assert b"--max-connections-per-address" in answered
        for reader in (one, other):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert "connections are refused" in caplog.text


def test_limits_leave_files_for_others():
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(StartupError, match="ulimit -n"):
        connections.connection_limits(limit, None)
    assert connections.connection_limits(10, None) == (10, 5)
    assert connections.connection_limits(10, 20) == (10, 10)
    assert connections.connection_limits(None, 7)[1] == 7


def slow_senders(url: str, count: int, addresses: int = 3) -> list[socket.socket]:
    """Connections from several addresses, each in the middle of a request."""
    host, port = url.removeprefix("http://").split(":")
    senders = []
    for number in range(count):
        sender = socket.socket()
        sender.settimeout(5)
        sender.bind((f"127.0.1.{number % addresses + 1}", 0))
        sender.connect((host, int(port)))
        sender.sendall(HEAD[:30])
        senders.append(sender)
    return senders


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="loopback has one address elsewhere")
def test_hundreds_of_slow_senders_shut_nobody_out(start: Start, flags: tuple[str, list[str]]):
    url, given = flags
    process = start(*given, open_files=256).until_ready(url)
    senders = slow_senders(url, 400)
    try:
        for _ in range(5):
            assert httpx.get(f"{url}/health", timeout=5).status_code == 200
            for sender in senders:
                with suppress(OSError):
                    sender.send(b"x")
        body = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}
        assert httpx.post(f"{url}/generate", json=body, timeout=20).status_code == 200
        assert psutil.Process(process.popen.pid).num_fds() < 256
    finally:
        for sender in senders:
            sender.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process cannot be set elsewhere")
def test_a_lack_of_files_is_told_and_survived(start: Start, flags: tuple[str, list[str]]):
    url, given = flags
    process = start(*given).until_ready(url)
    pid = process.popen.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    with pytest.raises(httpx.TimeoutException):
        httpx.get(f"{url}/health", timeout=2)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert httpx.get(f"{url}/health", timeout=10).status_code == 200
    assert sum("Too many open files (ulimit -n)" in line for line in process.lines()) == 1


@pytest.mark.slow
def test_the_metrics_port_has_few_connections(start: Start, flags: tuple[str, list[str]], free_port: FreePort):
    url, given = flags
    metrics = f"http://127.0.0.1:{free_port()}"
    process = start(*given, f"--prometheus-port={metrics.rpartition(':')[2]}").until_ready(url)
    before = psutil.Process(process.popen.pid).num_fds()
    senders = slow_senders(metrics, 200)
    try:
        assert "tgi_request_count" in httpx.get(f"{metrics}/metrics", timeout=10).text
        foreign = httpx.get(f"{metrics}/metrics", headers={"host": "page.example"}, timeout=10)
        assert foreign.status_code == 403
        assert psutil.Process(process.popen.pid).num_fds() < before + 80
        assert httpx.get(f"{url}/health", timeout=10).status_code == 200
    finally:
        for sender in senders:
            sender.close()
