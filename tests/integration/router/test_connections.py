"""Clients that stop halfway: in their request, or in reading the answer."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.router.conftest import Router, RouterFactory

HEAD = b"POST /generate HTTP/1.1\r\nhost: here\r\ncontent-length: 19\r\n\r\n"
BODY = b'{"inputs": "Hello"}'
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
BEGINNINGS = {
    "nothing": b"",
    "half a head": HEAD[:30],
    "no body": HEAD,
    "half a body": HEAD + BODY[:7],
    "a second request": HEAD + BODY + HEAD + BODY[:7],
}
LONG_STREAM = {"inputs": "Hello", "parameters": {"max_new_tokens": 20_000, "ignore_eos": True, "top_n_tokens": 5}}


@asynccontextmanager
async def connection(router: Router) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = router.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What comes before the server ends the connection."""
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


@pytest.mark.slow
async def test_who_goes_on_slowly_is_waited_for_and_may_wait(routers: RouterFactory):
    router = await routers(client_timeout=1, shard={"step_seconds": 0.4})

    async def ask_slowly() -> bytes:
        async with connection(router) as (reader, writer):
            for part in (HEAD[:20], HEAD[20:] + BODY[:5], BODY[5:10], BODY[10:]):
                writer.write(part)
                await asyncio.sleep(0.5)
            return await reader.readline()

    async def ask_for_much() -> int:
        return (await router.post("/generate", inputs="Hello", parameters={"max_new_tokens": 4})).status_code

    slow, long = await asyncio.gather(ask_slowly(), ask_for_much())
    assert slow.startswith(b"HTTP/1.1 200")
    assert long == 200


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


async def test_a_head_without_an_end_is_refused(router: Router):
    async with connection(router) as (reader, writer):
        writer.write(HEAD.replace(b"\r\n\r\n", b"\r\n"))
        with pytest.raises(ConnectionError):
            await write_headers(writer, 1000)
        assert await ended(reader) in (b"", TOO_LARGE)
    assert (await router.post("/generate", inputs="Hello")).status_code == 200


async def write_headers(writer: asyncio.StreamWriter, count: int) -> None:
    for _ in range(count):
        writer.write(b"x-header: " + b"x" * 10_000 + b"\r\n")
        await writer.drain()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system cannot tell")
async def test_who_does_not_read_holds_up_nobody_and_is_not_waited_for(routers: RouterFactory):
    router = await routers(client_timeout=1, max_concurrent_requests=2, shard={"max_total_tokens": 30_000})
    body = json.dumps(LONG_STREAM).encode()
    head = b"POST /generate_stream HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n" % len(body)
    host, port = router.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        client.sendall(head + body)
        await router.until(lambda: router.service.capacity.in_flight == 1)
        assert (await router.post("/generate", inputs="Hello")).status_code == 200
        await router.until(lambda: router.service.capacity.in_flight == 0, seconds=20)
    assert await router.metric('tgi_request_failure{err="cancelled"}') == 1
