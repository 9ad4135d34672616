"""The memory of the router's process while clients drive to its limit each kind of thing that is held of them."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.integration.router.process import Process, Start

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell")

MIB = 2**20
CHUNKED = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
LIMIT = 32 * MIB
# More than the parts of Python's heap that a process comes to use by and by.
SLACK = 48 * MIB

Running = tuple[str, Process]


@pytest.fixture
def router(start: Start, flags: tuple[str, list[str]]) -> Running:
    """The URL of a router, and its process, which has seen requests."""
    return running(start, flags, f"--max-client-memory={LIMIT // MIB}")


def running(start: Start, flags: tuple[str, list[str]], *more: str) -> Running:
    url, given = flags
    process = start(*given, *more).until_ready(url)
    httpx.post(f"{url}/generate", json={"inputs": "Hello", "parameters": {"max_new_tokens": 2}}, timeout=30)
    return url, process


def resident(process: Process, kind: str = "VmRSS") -> int:
    """Returns bytes of the process's memory. kind: VmHWM for the most that they ever were."""
    found = re.search(rf"^{kind}:\s+(\d+) kB$", Path(f"/proc/{process.popen.pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def growth_at_most(process: Process, most: int) -> Iterator[None]:
    """Fails if the process ever has so many more bytes than at the beginning."""
    Path(f"/proc/{process.popen.pid}/clear_refs").write_text("5")  # the highest is from now on
    before = resident(process)
    try:
        yield
    finally:
        grown = resident(process, "VmHWM") - before
        print(f"grown by {grown / MIB:.0f} MiB")
    assert grown <= most


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def send_until_refused(client: socket.socket, data: bytes, pieces: int) -> None:
    """Sends the data so many times, or until the server does not take more."""
    with suppress(OSError):
        for _ in range(pieces):
            client.sendall(data)


def answered(client: socket.socket) -> bytes:
    """Returns what the server sends until it ends the connection."""
    received = b""
    with suppress(ConnectionError):
        while piece := client.recv(65_536):
            received += piece
    return received


@pytest.mark.parametrize("kind", ["many fields", pytest.param("an endless field", marks=pytest.mark.slow)])
def test_trailers_of_a_chunked_body_are_bounded(router: Running, kind: str):
    url, process = router
    first, more = {"many fields": (b"", b"a: b\r\n" * 10_000), "an endless field": (b"a: ", b"b" * 60_000)}[kind]
    with growth_at_most(process, SLACK), connect(url) as client:
        client.sendall(CHUNKED + b"2\r\n{}\r\n0\r\n" + first)
        send_until_refused(client, more, 400)
        assert answered(client)[:13] in (b"HTTP/1.1 431 ", b"")  # what was not read may take the words back
        assert httpx.get(f"{url}/health", timeout=5).status_code == 200


@pytest.mark.slow
def test_requests_behind_an_answer_that_nobody_reads_are_bounded(router: Running):
    url, process = router
    with growth_at_most(process, SLACK), ExitStack() as stack:
        for _ in range(8):
            client = stack.enter_context(connect(url))
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(0.3)
            send_until_refused(client, b"GET / HTTP/1.1\r\n\r\n" * 10_000, 20)
        time.sleep(0.5)
        assert httpx.get(f"{url}/health", timeout=5).status_code == 200


def test_unfinished_bodies_are_bounded(router: Running):
    url, process = router
    head = CHUNKED.replace(b"transfer-encoding: chunked", b"content-length: 1900000")
    with growth_at_most(process, 2 * LIMIT + SLACK), ExitStack() as stack:
        for _ in range(200):
            send_until_refused(stack.enter_context(connect(url)), head + b" " * 1_800_000, 1)
        assert httpx.get(f"{url}/health", timeout=5).status_code == 200


@pytest.mark.slow
def test_heads_of_many_fields_are_bounded(router: Running):
    url, process = router
    with growth_at_most(process, SLACK), ExitStack() as stack:
        for _ in range(200):
            send_until_refused(stack.enter_context(connect(url)), CHUNKED[:-2] + b"a:\r\n" * 15_000, 1)
        assert httpx.get(f"{url}/health", timeout=5).status_code == 200


def asking(url: str, path: bytes, body: bytes) -> socket.socket:
    """Returns a client that has sent a request, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = url.removeprefix("http://").split(":")
    client.settimeout(20)
    client.connect((host, int(port)))
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path, len(body))
    send_until_refused(client, head + body, 1)
    return client


def test_what_bodies_become_is_bounded(router: Running):
    """Here each becomes thirty times as much, for as long as its answer is generated."""
    url, process = router
    kwargs = b",".join([b"[[[[]]]]"] * 30_000)
    body = (
        b'{"messages":[{"role":"user","content":"Hello"}],"max_tokens":2000,"ignore_eos":true,'
        b'"chat_template_kwargs":{"a":[%b]}}' % kwargs
    )
    with growth_at_most(process, 2 * LIMIT + SLACK), ExitStack() as stack:
        for _ in range(60):
            stack.enter_context(asking(url, b"/v1/chat/completions", body))
        time.sleep(1)
        assert httpx.get(f"{url}/health", timeout=5).status_code == 200
        refused = httpx.post(f"{url}/v1/chat/completions", content=body, timeout=30)
        assert refused.status_code == 429
        assert "--max-client-memory" in refused.text
        small = {"inputs": "Hello", "parameters": {"max_new_tokens": 2}}
        assert httpx.post(f"{url}/generate", json=small, timeout=30).status_code == 200


@pytest.mark.slow
def test_answers_that_nobody_reads_are_bounded(router: Running):
    url, process = router
    body = b'{"inputs":"%b"}' % (b"1 " * 30_000)
    assert len(httpx.post(f"{url}/tokenize", content=body, timeout=30).raise_for_status().content) > 2 * MIB
    with growth_at_most(process, 2 * LIMIT + SLACK), ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(asking(url, b"/tokenize", body))
        deadline, sizes = time.monotonic() + 90, [0, resident(process)]
        while time.monotonic() < deadline and sizes[-1] - sizes[-2] > MIB:  # answers are made one after the other
            time.sleep(5)
            sizes.append(resident(process))
        assert httpx.get(f"{url}/health", timeout=5).status_code == 200


@pytest.mark.slow
def test_stored_responses_take_what_they_have_as_json(start: Start, flags: tuple[str, list[str]]):
    """Whatever they repeat of their request: its objects would take twenty times as much."""
    url, process = running(start, flags)
    metadata = '{"a":[' + ",".join(["[]"] * 600_000) + "]}"
    body = f'{{"input":"Hello","max_output_tokens":2,"metadata":{metadata}}}'
    httpx.post(f"{url}/v1/responses", content=body, timeout=60)
    with growth_at_most(process, 3 * SLACK):
        for _ in range(12):
            assert httpx.post(f"{url}/v1/responses", content=body, timeout=60).status_code == 200
