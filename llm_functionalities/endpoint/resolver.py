"""Finds the IP addresses of host names, always within a bound.

`socket.getaddrinfo` cannot be bounded: with a name server that never answers it holds its thread for 10 seconds and
more. So names are looked up here in the order of nsswitch's usual `files dns`: IP addresses, then the names in
`/etc/hosts` and `localhost`, then the name servers of `resolv.conf`, asked with dnspython.
"""

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.query
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.resolver

from llm_functionalities.endpoint.address import DNS_PORT, is_ip_address
from llm_functionalities.endpoint.call import Call, Deadline
from llm_functionalities.errors import DeadlineExceeded, Unresolvable

logger = logging.getLogger(__name__)

HOSTS_FILE = Path("/etc/hosts")
RESOLV_CONF = Path("/etc/resolv.conf")
LOOPBACK = ("127.0.0.1", "::1")
MAX_ALIASES = 8

# A datagram may get lost, so each name server is asked this often before a name is given up.
ROUNDS = 2

# An address is remembered for no longer than this, whatever its time to live, because containers move.
LONGEST_MEMORY_SECONDS = 30.0

# While no name server answers, expired addresses are used for so long (RFC 8767); the lookup is repeated so often.
STALE_SECONDS = 3600.0
STALE_RETRY_SECONDS = 5.0


@dataclass(frozen=True)
class NameServers:
    """The name servers and the search list of resolv.conf(5)."""

    addresses: list[tuple[str, int]]
    search: list[dns.name.Name]
    ndots: int

    def candidates(self, name: dns.name.Name) -> list[dns.name.Name]:
        """Returns the absolute names that a relative one may mean, in the order to try them."""
        if name.is_absolute():
            return [name]
        absolute = name.concatenate(dns.name.root)
        completed = [name.concatenate(suffix) for suffix in self.search]
        dots = len(name) - 1
        return [absolute, *completed] if dots >= self.ndots else [*completed, absolute]


@dataclass(frozen=True)
class _Remembered:
    """The result of a look-up. `until` is on the clock of `time.monotonic()`."""

    addresses: list[str]
    until: float


class Resolver:
    """Finds addresses within `bound` seconds. All who ask for a name during a look-up share it.

    `servers` (address, port) are asked in place of those in `resolv_conf`, which is read anew for each look-up.
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
            Cancelled: the caller has gone.
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
        """Makes the next `resolve` ask again, because nothing listens at the remembered addresses of `name`."""
        with self._lock:
            self._known.pop(name, None)

    def put_last(self, name: str, address: str) -> None:
        """Makes later calls try the remembered addresses of `name` in another order, because this one failed."""
        with self._lock:
            if (known := self._known.get(name)) is not None and address in known.addresses:
                others = [each for each in known.addresses if each != address]
                self._known[name] = replace(known, addresses=[*others, address])

    def _wait(self, running: Future[list[str]], call: Call) -> list[str]:
        try:
            return running.result(timeout=call.remaining())
        except TimeoutError:
            raise DeadlineExceeded("the time was up before the host name was resolved") from None

    def _look_up_for_all(self, name: str, running: Future[list[str]]) -> None:
        # Bounded by the resolver's own bound alone: a short deadline of the first caller tells the others nothing.
        try:
            addresses, lifetime = self._look_up(name, Deadline.after(self._bound))
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
        """Returns expired addresses of `name`, and allows their use a little longer."""
        now = time.monotonic()
        with self._lock:
            known = self._known.get(name)
            if known is None or now - known.until > STALE_SECONDS:
                return []
            self._known[name] = replace(known, until=max(known.until, now + STALE_RETRY_SECONDS))
            return known.addresses

    def _look_up(self, name: str, deadline: Deadline) -> tuple[list[str], float]:
        servers = self._name_servers()
        problem = ""
        for candidate in servers.candidates(dns.name.from_text(name, origin=None)):
            for kind in (dns.rdatatype.A, dns.rdatatype.AAAA):
                try:
                    addresses, lifetime = _ask(servers, candidate, kind, deadline)
                except _NoSuchName:
                    break  # no kind of address, then
                except _NoResponse as error:
                    problem = str(error)
                    break
                if addresses:
                    return addresses, min(lifetime, LONGEST_MEMORY_SECONDS)
        if problem:
            raise _Unanswered(f"{name}: {problem}")
        raise Unresolvable(f"{name}: no such host")

    def _name_servers(self) -> NameServers:
        resolver = dns.resolver.Resolver(configure=False)
        try:
            resolver.read_resolv_conf(self._resolv_conf)
        except (dns.resolver.NoResolverConfiguration, dns.exception.DNSException, ValueError) as error:
            if self._servers is None:
                raise _Unanswered(f"no name server in {self._resolv_conf}: {error}") from None
        addresses = self._servers or [(str(server), DNS_PORT) for server in resolver.nameservers]
        search = list(resolver.search) or ([resolver.domain] if resolver.domain != dns.name.root else [])
        return NameServers(addresses, search, 1 if resolver.ndots is None else resolver.ndots)


class _Unanswered(Unresolvable):
    """No name server said whether the name has an address."""


class _NoSuchName(Exception):
    """The name does not exist."""


class _NoResponse(Exception):
    """All name servers failed to give a response that can be used."""


def _ask(
    servers: NameServers, name: dns.name.Name, kind: dns.rdatatype.RdataType, deadline: Deadline
) -> tuple[list[str], float]:
    """Returns the addresses of one kind and their time to live in seconds; no address when the name has none."""
    for _ in range(MAX_ALIASES):
        response = _query(servers, name, kind, deadline)
        answer = dns.resolver.Answer(name, kind, dns.rdataclass.IN, response)
        if answer.rrset is not None:
            return [record.address for record in answer.rrset], answer.chaining_result.minimum_ttl
        if answer.canonical_name == name:
            return [], 0.0
        name = answer.canonical_name  # a server that knows the alias, yet not what it stands for
    raise _NoResponse("too many aliases")


def _query(
    servers: NameServers, name: dns.name.Name, kind: dns.rdatatype.RdataType, deadline: Deadline
) -> dns.message.QueryMessage:
    problem = "no name server"
    for address, port, patience in _attempts(servers.addresses, deadline):
        try:
            response = _send(dns.message.make_query(name, kind), address, port, Deadline.after(patience))
        except dns.exception.Timeout:
            problem = f"name server {address} does not answer"
        except (dns.exception.DNSException, OSError, EOFError) as error:
            problem = f"name server {address}: {error}"
        else:
            if response.rcode() == dns.rcode.NXDOMAIN:
                raise _NoSuchName
            if response.rcode() == dns.rcode.NOERROR and isinstance(response, dns.message.QueryMessage):
                return response
            problem = f"name server {address} answered {dns.rcode.to_text(response.rcode())}"
    raise _NoResponse(problem)


def _attempts(addresses: list[tuple[str, int]], deadline: Deadline) -> Iterator[tuple[str, int, float]]:
    """Yields the servers in turn, each with its share, in seconds, of the time that is left."""
    left = ROUNDS * len(addresses)
    for _ in range(ROUNDS):
        for address, port in addresses:
            if (remaining := deadline.remaining()) <= 0:
                return
            yield address, port, remaining / left
            left -= 1


def _send(query: dns.message.Message, address: str, port: int, deadline: Deadline) -> dns.message.Message:
    """Asks over UDP, then over TCP when the response does not fit into a datagram."""
    try:
        return dns.query.udp(
            query,
            address,
            timeout=deadline.remaining(),
            port=port,
            ignore_unexpected=True,
            ignore_errors=True,
            raise_on_truncation=True,
        )
    except dns.message.Truncated:
        return dns.query.tcp(query, address, timeout=max(0.001, deadline.remaining()), port=port)


def local_addresses(name: str, hosts_file: Path) -> list[str]:
    """Returns the addresses that the machine knows for `name`: hosts(5), and RFC 6761 section 6.3 for localhost."""
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
