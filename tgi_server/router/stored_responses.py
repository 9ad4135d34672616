"""Responses that later requests may continue: stored in memory as JSON, for the API key that requested them."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import uuid4

from tgi_server.router.errors import NoSuchItem, NoSuchResponse

# Bytes of all stored responses.
_MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the turns of its conversation up to it, joined by commas; both as JSON.

    input, output: the items of its request and its own, as JSON, by id.
    """

    response: bytes
    turns: bytes
    input: Mapping[str, bytes] = field(default_factory=dict)
    output: Mapping[str, bytes] = field(default_factory=dict)

    def __len__(self) -> int:
        items = (*self.input.values(), *self.output.values())
        return len(self.response) + len(self.turns) + sum(map(len, items))


class StoredResponses:
    """Stores responses by tenant. When it is full, the oldest response of the tenant that stores most is dropped."""

    def __init__(self, most: int) -> None:
        """most: number of responses; 0: none are stored."""
        self._most = most
        self._of: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}
        # Of each tenant: the response that each item belongs to.
        self._items: dict[str, dict[str, str]] = {}

    def add(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Stores a response under its id."""
        self._of.setdefault(tenant, OrderedDict())[response_id] = stored
        self._bytes[tenant] = self._bytes.get(tenant, 0) + len(stored)
        self._items.setdefault(tenant, {}).update(dict.fromkeys((*stored.input, *stored.output), response_id))
        while sum(map(len, self._of.values())) > self._most:
            self._drop_oldest(max(self._of, key=lambda each: len(self._of[each])))
        while sum(self._bytes.values()) > _MOST_BYTES:
            self._drop_oldest(max(self._bytes, key=self._bytes.__getitem__))

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises NoSuchResponse."""
        if tenant not in self._of or response_id not in self._of[tenant]:
            raise NoSuchResponse(response_id)
        return self._of[tenant][response_id]

    def item(self, tenant: str, item_id: str) -> bytes:
        """Returns an item of a stored response, or of its input, as JSON. Raises NoSuchItem."""
        response_id = self._items.get(tenant, {}).get(item_id)
        if response_id is None:
            raise NoSuchItem(item_id)
        stored = self._of[tenant][response_id]
        return stored.output[item_id] if item_id in stored.output else stored.input[item_id]

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises NoSuchResponse."""
        stored = self.get(tenant, response_id)
        self._bytes[tenant] -= len(stored)
        del self._of[tenant][response_id]
        for item_id in (*stored.input, *stored.output):
            del self._items[tenant][item_id]
        if not self._of[tenant]:
            del self._of[tenant], self._bytes[tenant], self._items[tenant]

    def _drop_oldest(self, tenant: str) -> None:
        self.delete(tenant, next(iter(self._of[tenant])))


def new_id(kind: str) -> str:
    """Returns an id that cannot be guessed."""
    return f"{kind}_{uuid4().hex}"
