"""Responses that later requests may continue: stored in memory as JSON, for the API key that requested them."""

from collections import OrderedDict
from dataclasses import dataclass
from uuid import uuid4

from tgi_server.router.errors import NoSuchResponse

# Bytes of all stored responses.
_MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the turns of its conversation up to it, joined by commas; both as JSON."""

    response: bytes
    turns: bytes

    def __len__(self) -> int:
        return len(self.response) + len(self.turns)


class StoredResponses:
    """Stores responses by tenant. When it is full, the oldest response of the tenant that stores most is dropped."""

    def __init__(self, most: int) -> None:
        """most: number of responses; 0: none are stored."""
        self._most = most
        self._of: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}

    def add(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Stores a response under its id."""
        self._of.setdefault(tenant, OrderedDict())[response_id] = stored
        self._bytes[tenant] = self._bytes.get(tenant, 0) + len(stored)
        while sum(map(len, self._of.values())) > self._most:
            self._drop_oldest(max(self._of, key=lambda each: len(self._of[each])))
        while sum(self._bytes.values()) > _MOST_BYTES:
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises NoSuchResponse."""
        if tenant not in self._of or response_id not in self._of[tenant]:
            raise NoSuchResponse(response_id)
        return self._of[tenant][response_id]

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises NoSuchResponse."""
        stored = self.get(tenant, response_id)
        self._bytes[tenant] -= len(stored)
        del self._of[tenant][response_id]
        if not self._of[tenant]:
            del self._of[tenant], self._bytes[tenant]

    def _drop_oldest(self, tenant: str) -> None:
        self.delete(tenant, next(iter(self._of[tenant])))


def new_id(kind: str) -> str:
    """Returns an id that nobody can guess."""
    return f"{kind}_{uuid4().hex}"
