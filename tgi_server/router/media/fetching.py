"""The bytes of an image, from a host that the operator has named."""

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urljoin

import httpcore2
import httpx2

from shared.addresses import is_ip_address
from tgi_server.fairness import FairQueue
from tgi_server.router.media.data_urls import check_size
from tgi_server.router.media.messages import UnusableImage

# Seconds for one image, all redirects and look-ups of names included.
_SECONDS = 10.0
# Images that are fetched at a time, in all and of one client.
_PLACES, _MOST_OF_ONE = 32, 8
_MOST_REDIRECTS = 3
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
# Addresses of IPv4 in these networks stand in the last four bytes (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_FLAG = "--allowed-media-domains"


class Fetcher:
    """Fetches images over HTTP(S) from the hosts of `allowed`: HOST, HOST:PORT, or *.DOMAIN for all below it.

    A host is connected to at the address that was checked, so its name cannot come to mean another one meanwhile.
    Addresses of private networks and of this machine are refused, unless the entry is HOST:PORT or an IP address.
    """

    def __init__(self, allowed: Collection[str]) -> None:
        self._allowed = frozenset(each.lower() for each in allowed)
        self._queue = FairQueue(_PLACES, _MOST_OF_ONE)
        # Look-ups of names that do not answer occupy threads for as long as the system's resolver waits.
        self._threads = ThreadPoolExecutor(_PLACES, "media look-up")
        self._connections = httpcore2.AsyncConnectionPool(
            network_backend=_CheckedConnections(self),
            max_connections=_PLACES,
            max_keepalive_connections=0,
            retries=0,
        )

    async def fetch(self, url: str, client: str, hold: Callable[[int], None]) -> bytes:
        """Returns the bytes at a URL with the scheme http or https. Raises UnusableImage.

        client: takes turns with others. hold: counts the bytes that have come; what it raises ends the fetch.
        """
        if url[:8].partition(":")[0].lower() not in _PORTS:
            raise UnusableImage("its URL must begin with data:, https:// or http://")
        try:
            self._check(url)
            async with self._queue.place(client), asyncio.timeout(_SECONDS):
                return await self._get(url, hold)
        except TimeoutError:
            raise UnusableImage(f"it could not be fetched within {_SECONDS:.0f} s") from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException, OSError) as error:
            raise UnusableImage(f"it could not be fetched: {error or type(error).__name__}") from None

    async def close(self) -> None:
        await self._connections.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _get(self, url: str, hold: Callable[[int], None]) -> bytes:
        for _ in range(_MOST_REDIRECTS + 1):
            target = self._check(url)
            async with self._connections.stream("GET", str(target), headers=_headers(target)) as response:
                if response.status not in _REDIRECTS:
                    return await _body(response, hold)
                location = next((value for name, value in response.headers if name.lower() == b"location"), b"")
                url = urljoin(url, location.decode("latin-1"))
        raise UnusableImage(f"its URL redirects more than {_MOST_REDIRECTS} times")

    def _check(self, url: str) -> httpx2.URL:
        """Returns the URL. Raises UnusableImage unless its host may be called."""
        try:
            target = httpx2.URL(url)
        except httpx2.InvalidURL:
            raise UnusableImage("its URL is invalid") from None
        if target.scheme not in _PORTS or not target.host or target.userinfo:
            raise UnusableImage("its URL must be of the form https://HOST/PATH, without a user")
        if self._entry(target.host, _port(target)) is None:
            raise UnusableImage(f"this server does not fetch from the host {_shown(target)} ({_FLAG})")
        return target

    def _entry(self, host: str, port: int) -> str | None:
        """Returns the entry of the allowed hosts that a host fits; None if there is none."""
        host = host.lower().rstrip(".")
        shown = f"[{host}]" if ":" in host else host
        if f"{shown}:{port}" in self._allowed:
            return f"{shown}:{port}"
        if port not in _PORTS.values():
            return None
        parents = ("*." + host.split(".", cut)[-1] for cut in range(1, host.count(".") + 1))
        return next((each for each in (shown, host, *parents) if each in self._allowed), None)

    async def addresses(self, host: str, port: int) -> list[str]:
        """Returns the addresses at which a host may be connected to. Raises UnusableImage if there are none."""
        entry = self._entry(host, port)
        if entry is None:
            raise UnusableImage(f"this server does not fetch from the host {host[:100]} ({_FLAG})")
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._threads, _look_up, host, port)
        except OSError as error:
            raise UnusableImage(f"its host {host[:100]} has no address: {error.strerror}") from None
        named = ":" in entry or is_ip_address(entry.strip("[]"))
        usable = [each for each in found if _may_connect(each, private=named)]
        if not usable:
            raise UnusableImage(f"its host {host[:100]} is at an address of a private network or of this machine")
        return usable


class _CheckedConnections(httpcore2.AsyncNetworkBackend):
    """Connects to the addresses that have been checked, and to no other."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._tcp = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109  # the name is the base class's
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        failed: Exception = OSError("no address")
        for address in await self._fetcher.addresses(host, port):
            try:
                return await self._tcp.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failed = error
        raise failed


async def _body(response: Any, hold: Callable[[int], None]) -> bytes:
    """Returns the body of a response. hold: counts its bytes.

    Raises UnusableImage for another status than 200, or too many bytes.
    """
    if response.status != 200:
        raise UnusableImage(f"its host responded with the status {response.status}")
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.aiter_stream():
        size += len(chunk)
        check_size(size)
        hold(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


def _headers(target: httpx2.URL) -> list[tuple[bytes, bytes]]:
    return [(b"Host", target.netloc), (b"Accept", b"image/*"), (b"User-Agent", b"oatmill")]


def _port(target: httpx2.URL) -> int:
    return target.port or _PORTS[target.scheme]


def _shown(target: httpx2.URL) -> str:
    return target.netloc.decode("ascii", "replace")[:100]


def _look_up(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _may_connect(text: str, *, private: bool) -> bool:
    """Returns True if images may be fetched from an address. private: also from this machine and private networks.

    Never from link-local addresses, where machines of clouds have their credentials.
    """
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            address = ipaddress.ip_address(int(address) & 0xFFFFFFFF)
        elif address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address.sixtofour is not None or address.teredo is not None:
            return False
    if address.is_loopback:
        return private
    if address.is_link_local or address.is_multicast or address.is_reserved or address.is_unspecified:
        return False
    return address.is_global or private
