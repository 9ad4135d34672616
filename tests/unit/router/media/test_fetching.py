"""Images are fetched from hosts that the operator has named, at addresses that were checked, and from nowhere else."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from threading import Thread
from typing import Any

import pytest

from tests.fakes.web_server import Web
from tgi_server.router.media import data_urls, fetching
from tgi_server.router.media.fetching import Fetcher
from tgi_server.router.media.messages import UnusableImage


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.files["photo.png"] = b"an image"
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
async def fetched() -> AsyncIterator[Any]:
    fetchers: list[Fetcher] = []

    async def fetch(url: str, *allowed: str) -> bytes:
        fetchers.append(Fetcher(allowed))
        return await fetchers[-1].fetch(url, "client", lambda size: None)

    yield fetch
    for fetcher in fetchers:
        await fetcher.close()


def names_of(monkeypatch: pytest.MonkeyPatch, addresses: dict[str, Sequence[str]]) -> None:
    """Has the system's resolver know these names, each look-up of one taking the next of its addresses."""
    left = {name: list(each) for name, each in addresses.items()}

    def look_up(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        if host not in left:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        address = left[host].pop(0) if len(left[host]) > 1 else left[host][0]
        return [(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))]

    monkeypatch.setattr(fetching.socket, "getaddrinfo", look_up)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///etc/passwd", "must begin with"),
        ("ftp://example.com/a", "must begin with"),
        ("/etc/passwd", "must begin with"),
        ("http://127.0.0.1/a", "--allowed-media-domains"),
        ("http://example.com.evil.com/a", "--allowed-media-domains"),
        ("http://evil.com#example.com/a", "--allowed-media-domains"),
        ("http://user@example.com/a", "without a user"),
        ("http://example.com:22/a", "--allowed-media-domains"),
        ("http:///a", "https://HOST/PATH"),
    ],
)
async def test_other_urls_are_refused(url, reason, fetched):
    with pytest.raises(UnusableImage, match=reason):
        await fetched(url, "example.com")


async def test_an_image_comes_from_a_host_and_port_that_are_named(web, fetched):
    port = web.server_address[1]
    assert await fetched(web.url("photo.png"), f"127.0.0.1:{port}") == b"an image"
    with pytest.raises(UnusableImage, match="--allowed-media-domains"):
        await fetched(web.url("photo.png"), "127.0.0.1")
    with pytest.raises(UnusableImage, match="status 404"):
        await fetched(web.url("nothing.png"), f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1"),
        *("::1", "fd00::1", "fe80::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::"),
    ],
)
async def test_a_name_of_a_private_address_is_refused(address, fetched, monkeypatch):
    names_of(monkeypatch, {"images.example.com": [address]})
    for allowed in ("images.example.com", "*.example.com"):
        with pytest.raises(UnusableImage, match="private network"):
            await fetched("http://images.example.com/a", allowed)


async def test_a_link_local_address_is_refused_even_if_it_is_named(fetched):
    with pytest.raises(UnusableImage, match="private network"):
        await fetched("http://169.254.169.254/latest", "169.254.169.254", "169.254.169.254:80")


async def test_the_address_that_was_checked_is_the_one_that_is_called(web, fetched, monkeypatch):
    """A name that is looked up again, and then means this machine, is of no use."""
    names_of(monkeypatch, {"rebinding.example.com": ["192.0.2.1", "127.0.0.1"]})
    called: list[str] = []

    async def connect(_: Any, host: str, *__: Any) -> None:
        called.append(host)
        raise OSError("no route")

    monkeypatch.setattr(fetching.httpcore2.AnyIOBackend, "connect_tcp", connect)
    monkeypatch.setattr(fetching, "_may_connect", lambda address, private: address == "192.0.2.1")
    with pytest.raises(UnusableImage, match="no route"):
        await fetched("http://rebinding.example.com/a", "rebinding.example.com")
    assert called == ["192.0.2.1"]


async def test_each_redirect_is_checked(web, fetched):
    allowed = f"127.0.0.1:{web.server_address[1]}"
    web.redirects = {"there": "photo.png", "away": "http://127.0.0.1:9/", "file": "file:///etc/passwd", "loop": "loop"}
    assert await fetched(web.url("there"), allowed) == b"an image"
    for path, reason in (("away", "--allowed-media-domains"), ("file", "https://HOST"), ("loop", "redirects more")):
        with pytest.raises(UnusableImage, match=reason):
            await fetched(web.url(path), allowed)


async def test_an_image_has_a_bound_of_bytes(web, fetched, monkeypatch):
    monkeypatch.setattr(data_urls, "MOST_BYTES", 1000)
    web.files["large.png"] = b"a" * 1001
    with pytest.raises(UnusableImage, match="may have 1000"):
        await fetched(web.url("large.png"), f"127.0.0.1:{web.server_address[1]}")


async def test_bytes_are_counted_as_they_come(web):
    held: list[int] = []
    allowed = f"127.0.0.1:{web.server_address[1]}"
    web.files["large.png"] = b"a" * 300_000
    fetcher = Fetcher([allowed])
    await fetcher.fetch(web.url("large.png"), "client", held.append)
    assert (sum(held), len(held) > 1) == (300_000, True)
    await fetcher.close()


async def test_slow_hosts_of_one_client_leave_room_for_others(web):
    """Ten fetches from a host that does not answer took all connections, for as long as it did not."""
    silent = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    slow = f"127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    fetcher = Fetcher([slow, f"127.0.0.1:{web.server_address[1]}"])
    waiting = [asyncio.create_task(fetcher.fetch(f"http://{slow}/a", "a", print)) for _ in range(40)]
    await asyncio.sleep(0.1)
    assert await fetcher.fetch(web.url("photo.png"), "b", print) == b"an image"
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await fetcher.close()
    silent.close()


async def test_a_host_that_does_not_answer_is_given_up(fetched, monkeypatch):
    monkeypatch.setattr(fetching, "_SECONDS", 0.1)
    server = await asyncio.start_server(lambda *_: asyncio.sleep(60), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(UnusableImage, match="within"):
        await fetched(f"http://127.0.0.1:{port}/a", f"127.0.0.1:{port}")
    server.close()
