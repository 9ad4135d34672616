"""The memory that a server uses for its clients: its total, its limit, and who is refused at the limit."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

from tgi_server.router.errors import Overloaded, PayloadTooLarge, RouterError

logger = logging.getLogger(__name__)

# Key of a request's lease in the state of its scope.
LEASE = "lease"
# Bytes that may arrive before the memory is counted again.
_INTERVAL = 16 * 2**20
_FLAG = "--max-client-memory"
# Estimated bytes of parsed JSON, per byte of ASCII, per byte of other text, and per item, list and object: one
# character beyond the BMP makes its whole string four bytes wide, and an object may become a message with its parts.
_ASCII, _TEXT, _ITEM, _LIST, _OBJECT = 1, 4, 40, 80, 400


class Holder(Protocol):
    """A connection or request for which memory is held. network: `network_of` the client's address."""

    network: str

    @property
    def held(self) -> int:
        """Number of bytes that are held for it."""

    def refuse(self) -> None:
        """Ends the request: with an error response if none has begun, else by closing the connection."""


class Account:
    """The memory of all connections and requests of a server.

    Beyond the limit, the largest request or connection of the address with most memory is refused, until the total
    fits. A new request is refused if it would exceed the limit, or the share of its address.
    """

    def __init__(self, most: int, share: float) -> None:
        """most: limit in bytes. share: fraction of it that one address may have.

        `on_counted` is called with the total bytes whenever these have been counted.
        """
        self._most = most
        self._share = int(most * share)
        self._holders: set[Holder] = set()
        self._bound = 0  # upper bound of the bytes held: those at the last count, and all received since
        self._looked_at = 0
        self.on_counted: Callable[[int], None] = lambda held: None

    def add(self, holder: Holder) -> None:
        """Counts the memory of a connection or request from now on."""
        self._holders.add(holder)

    def remove(self, holder: Holder) -> None:
        """Stops counting the memory of a connection or request."""
        self._holders.discard(holder)

    def grew(self, size: int) -> None:
        """Counts received bytes."""
        self._bound += size
        if self._bound > self._looked_at + _INTERVAL:
            self.shed()

    def admit(self, network: str, size: int) -> None:
        """Reserves bytes for an address. Raises Overloaded, or PayloadTooLarge."""
        if size > self._share:
            raise PayloadTooLarge(
                f"the request takes about {size} bytes of memory; a client may have {self._share} ({_FLAG})"
            )
        if self._bound + size > self._share:
            held = self._look()
            own = sum(each for holder, each in held.items() if holder.network == network)
            if own + size > self._share or self._bound + size > self._most:
                raise memory_full()
        self._bound += size

    def shed(self) -> None:
        """Refuses requests and connections, the largest of the address with most memory first, until the total fits."""
        held = self._look()
        total = self._bound
        if total <= self._most:
            return
        networks: Counter[str] = Counter()
        for holder, size in held.items():
            networks[holder.network] += size
        largest = sorted(held, key=held.__getitem__)
        while total > self._most:
            network = max(networks, key=networks.__getitem__)
            holder = next(each for each in reversed(largest) if each.network == network)
            largest.remove(holder)
            networks[network] -= held[holder]
            total -= held[holder]
            logger.warning("refused a client that held %d bytes: the limit is %s", held[holder], _FLAG)
            holder.refuse()
            self.remove(holder)  # its request may end some turns of the event loop later

    def _look(self) -> dict[Holder, int]:
        held = {holder: size for holder in self._holders if (size := holder.held)}
        self._bound = self._looked_at = sum(held.values())
        self.on_counted(self._bound)
        return held


class Lease:
    """The memory of one request, until it is answered and nothing runs for it.

    size: bytes of the request. answer: returns the bytes of its answer so far. sending: bytes of a response in one
    piece. end: ends the request with an error; returns False if only closing the connection can end it.
    """

    __slots__ = ("_account", "_refuse", "_shared", "answer", "end", "network", "sending", "size")

    def __init__(self, account: Account, network: str, refuse: Callable[[], None]) -> None:
        self._account = account
        self._refuse = refuse
        self.network = network
        self._shared: set[bytes] = set()
        self.size = self.sending = 0
        self.answer: Callable[[], int] | None = None
        self.end: Callable[[RouterError], bool] | None = None

    @property
    def held(self) -> int:
        return self.size + self.sending + (0 if self.answer is None else self.answer())

    def grow(self, size: int) -> None:
        """Counts bytes of the body as they arrive."""
        self.size += size
        self._account.grew(size)

    def parse(self, body: bytes) -> None:
        """Counts the estimated memory of the parsed body. Raises Overloaded, or PayloadTooLarge."""
        size = (_ASCII if body.isascii() and b"\\u" not in body else _TEXT) * len(body)
        for character, each in ((b",", _ITEM), (b"[", _LIST), (b"{", _OBJECT)):
            size += each * body.count(character)
        self._account.admit(self.network, size)
        self.size += size

    def hold(self, size: int) -> None:
        """Counts further memory of the request. Raises Overloaded, or PayloadTooLarge."""
        self._account.admit(self.network, size)
        self.size += size

    def hold_once(self, name: bytes, size: int) -> None:
        """Counts an object that a request may have several times, such as an image, once. Raises as `hold` does."""
        if name not in self._shared:
            self.hold(size)
            self._shared.add(name)

    def give_back(self, size: int) -> None:
        """Stops counting bytes that were counted before."""
        self.size -= size

    def refuse(self) -> None:
        if self.end is None or not self.end(memory_full()):
            self._refuse()


def memory_full() -> Overloaded:
    return Overloaded(f"the memory for clients is full ({_FLAG}); try again later")


def lease_of(scope: Scope) -> Lease:
    """Returns the lease of a request."""
    lease: Lease = scope["state"][LEASE]
    return lease
