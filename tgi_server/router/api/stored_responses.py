"""Responses that clients may go on with: kept in memory, the oldest given up first."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from tgi_server.router.errors import NoSuchResponse

# Of all that is kept, as JSON.
_MOST_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, and the conversation up to it: messages as chats have them."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]
    size: int


class StoredResponses:
    """Keeps responses, each for the tenant that asked for it."""

    def __init__(self, most: int) -> None:
        """most: responses that are kept; 0: none."""
        self._most = most
        self._size = 0
        self._kept: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()

    def add(self, tenant: str, response: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keeps a response under its id."""
        size = len(json.dumps(response)) + len(json.dumps(messages))
        self._kept[tenant, response["id"]] = StoredResponse(response, messages, size)
        self._size += size
        while self._kept and (len(self._kept) > self._most or self._size > _MOST_BYTES):
            _, oldest = self._kept.popitem(last=False)
            self._size -= oldest.size

    def get(self, tenant: str, response_id: str) -> StoredResponse:
        """Raises NoSuchResponse."""
        stored = self._kept.get((tenant, response_id))
        if stored is None:
            raise NoSuchResponse(response_id)
        return stored

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises NoSuchResponse."""
        self._size -= self.get(tenant, response_id).size
        del self._kept[tenant, response_id]


def new_id(kind: str) -> str:
    """Returns an id that nobody can guess."""
    return f"{kind}_{uuid4().hex}"
