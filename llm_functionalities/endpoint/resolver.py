"""Finds the IP addresses of host names, always within a time-out.

`socket.getaddrinfo` has no time-out: if a name server never answers, it blocks its thread for 10 seconds and more. So
names are resolved here, in the order of nsswitch's usual `files dns`: IP addresses, then the names in `/etc/hosts` and
`localhost`, then the name servers of `resolv.conf`, through dnspython.
"""

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import dns.asyncresolver
import dns.exception
import dns.name
import dns.nameserver
import dns.rdatatype
import dns.resolver

from llm_functionalities.endpoint.call import Call
from llm_functionalities.errors import DeadlineExceeded, Unresolvable
from shared.addresses import is_ip_address

logger = logging.getLogger(__name__)

HOSTS_FILE = Path("/etc/hosts")
RESOLV_CONF = Path("/etc/resolv.conf")
LOOPBACK = ("127.0.0.1", "::1")
MAX_ALIASES = 8

# A datagram may get lost, so each name server gets this many queries before the look-up fails.
ROUNDS = 2

# Maximum seconds for which an address is cached, whatever its time to live, because containers move.
LONGEST_MEMORY_SECONDS = 30.0
# While no name server answers: seconds for which expired addresses are used (RFC 8767), and seconds between look-ups.
STALE_SECONDS = 3600.0
STALE_RETRY_SECONDS = 5.0


@dataclass(frozen=True)
class _Remembered:
    """The cached result of a look-up. until: expiry on the clock of `time.monotonic()`."""

    addresses: list[str]
    until: float


class Resolver:
    """Finds addresses within `bound` seconds. Concurrent calls for the same name share a look-up.

    servers: (address, port) of name servers to query instead of those in `resolv_conf`, which is read for each look-up.
    """

    def __init__(
        self,
        bound: float = 1.0,
        *,
        servers: list[tuple[str, int]] | None = None,
        hosts_file: Path = HOSTS_FILE,
        resolv_conf: Path = RESOLV_CONF,
    ) -> None:
        self._bound = bound
        self._servers = servers
        self._hosts_file = hosts_file
        self._resolv_conf = resolv_conf
        self._lock = threading.Lock()
        self._known: dict[str, _Remembered] = {}
        self._running: dict[str, Future[list[str]]] = {}

    def resolve(self, name: str, call: Call) -> list[str]:
        """Returns the addresses of `name`, in the order to try them.

        Raises:
            Unresolvable: there are none, or none came within the bound.
            DeadlineExceeded: the call's time is up.
            Cancelled: the call was cancelled.
        """
        if is_ip_address(name):
            return [name]
        if addresses := local_addresses(name, self._hosts_file):
            return addresses
        with self._lock:
            known = self._known.get(name)
            if known is not None and known.until > time.monotonic():
                return known.addresses
            running = self._running.get(name)
            mine = running is None
            if running is None:
                running = self._running[name] = Future()
        if mine:
            self._look_up_for_all(name, running)
        return self._wait(running, call)

    def forget(self, name: str) -> None:
        """Removes `name` from the cache, because nothing listens at its addresses."""
        with self._lock:
            self._known.pop(name, None)

    def put_last(self, name: str, address: str) -> None:
        """Moves an address of `name` to the end of its cached addresses, because it failed."""
        with self._lock:
            if (known := self._known.get(name)) is not None and address in known.addresses:
                others = [each for each in known.addresses if each != address]
                self._known[name] = replace(known, addresses=[*others, address])

    def _wait(self, running: Future[list[str]], call: Call) -> list[str]:
        try:
            return running.result(timeout=call.remaining())
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the host name was resolved") from None

    def _look_up_for_all(self, name: str, running: Future[list[str]]) -> None:
        # Limited only by the resolver's own time-out: a short deadline of the first caller must not affect the others.
        try:
            addresses, lifetime = asyncio.run(self._look_up(name))
        except _Unanswered as error:
            if stale := self._stale(name):
                logger.warning("using the last known addresses of %s: %s", name, error)
                running.set_result(stale)
            else:
                running.set_exception(error)
        except Unresolvable as error:
            self.forget(name)
            running.set_exception(error)
        except Exception as error:
            running.set_exception(Unresolvable(f"{name}: {error}"))
        else:
            with self._lock:
                self._known[name] = _Remembered(addresses, time.monotonic() + lifetime)
            running.set_result(addresses)
        finally:
            with self._lock:
                del self._running[name]

    def _stale(self, name: str) -> list[str]:
        """Returns the expired addresses of `name`, and extends their use a little."""
        now = time.monotonic()
        with self._lock:
            known = self._known.get(name)
            if known is None or now - known.until > STALE_SECONDS:
                return []
            self._known[name] = replace(known, until=max(known.until, now + STALE_RETRY_SECONDS))
            return known.addresses

    async def _look_up(self, name: str) -> tuple[list[str], float]:
        """Returns the addresses of `name` and their time to live in seconds. Raises Unresolvable."""
        resolver = self._configured()
        problem = ""
        try:
            async with asyncio.timeout(self._bound):
                for candidate in _candidates(dns.name.from_text(name, origin=None), resolver):
                    try:
                        addresses, lifetime = await _addresses_of(candidate, resolver)
                    except dns.resolver.NXDOMAIN:
                        continue
                    except dns.resolver.NoNameservers as error:
                        problem = _first_problem(error)
                        continue
                    if addresses:
                        return addresses, min(lifetime, LONGEST_MEMORY_SECONDS)
        except TimeoutError:
            problem = f"name server {', '.join(map(_address_of, resolver.nameservers))} does not answer"
        if problem:
            raise _Unanswered(f"{name}: {problem}")
        raise Unresolvable(f"{name}: no such host")

    def _configured(self) -> dns.asyncresolver.Resolver:
        resolver = dns.asyncresolver.Resolver(configure=False)
        try:
            resolver.read_resolv_conf(str(self._resolv_conf))
        except (dns.resolver.NoResolverConfiguration, dns.exception.DNSException, ValueError) as error:
            if self._servers is None:
                raise _Unanswered(f"no name server in {self._resolv_conf}: {error}") from None
        if self._servers is not None:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(*server) for server in self._servers]
        resolver.timeout = self._bound / (ROUNDS * len(resolver.nameservers))
        resolver.lifetime = 2 * self._bound  # never reached: `_look_up` has an exact time-out
        return resolver


class _Unanswered(Unresolvable):
    """No name server answered the question for the name's addresses."""


def _candidates(name: dns.name.Name, resolver: dns.asyncresolver.Resolver) -> list[dns.name.Name]:
    """Returns the absolute names that a relative one may mean, in the order to try them (resolv.conf(5)).

    dnspython's own search stops at the first name for which a server fails, or that has no address.
    """
    if name.is_absolute():
        return [name]
    search = resolver.search or ([resolver.domain] if resolver.domain != dns.name.root else [])
    absolute, completed = name.concatenate(dns.name.root), [name.concatenate(suffix) for suffix in search]
    ndots = 1 if resolver.ndots is None else resolver.ndots
    return [absolute, *completed] if len(name) - 1 >= ndots else [*completed, absolute]


async def _addresses_of(name: dns.name.Name, resolver: dns.asyncresolver.Resolver) -> tuple[list[str], float]:
    """Returns a name's IPv4 addresses, or else its IPv6 ones, and their time to live in seconds.

    Raises dns.resolver.NXDOMAIN and NoNameservers.
    """
    for kind in (dns.rdatatype.A, dns.rdatatype.AAAA):
        for _ in range(MAX_ALIASES):
            answer = await resolver.resolve(name, kind, raise_on_no_answer=False, search=False)
            if answer.rrset is not None:
                return [record.address for record in answer.rrset], answer.chaining_result.minimum_ttl
            if answer.canonical_name == name:
                break
            name = answer.canonical_name  # the server knows the alias but not its target's address
    return [], 0.0


def _first_problem(error: dns.resolver.NoNameservers) -> str:
    """Returns the failure of the first name server, such as `name server 192.0.2.1: SERVFAIL`."""
    name_server, _, _, reason, _ = error.kwargs["errors"][0]
    return f"name server {_address_of(name_server)}: {reason}"


def _address_of(name_server: object) -> str:
    """Returns the IP address of a name server, which dnspython writes as an address or as `Do53:address@port`."""
    return str(name_server).removeprefix("Do53:").partition("@")[0]


def local_addresses(name: str, hosts_file: Path) -> list[str]:
    """Returns the addresses of `name` that need no name server: by hosts(5), or by RFC 6761, 6.3 for localhost."""
    wanted = name.rstrip(".").lower()
    if found := [address for address, names in _entries(hosts_file) if wanted in names]:
        return found
    return list(LOOPBACK) if wanted == "localhost" or wanted.endswith(".localhost") else []


def _entries(hosts_file: Path) -> list[tuple[str, list[str]]]:
    try:
        text = hosts_file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []  # a container need not have one
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [(words[0], [word.lower() for word in words[1:]]) for words in lines if words and is_ip_address(words[0])]
