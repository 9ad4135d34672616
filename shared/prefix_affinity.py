"""Remembers which server was sent which beginnings of prompts, so that a prompt goes to where most of it is cached."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator

# A digest is computed after each step of bytes, up to the longest beginning.
STEP_BYTES, _LONGEST_BYTES = 256, 2**18
# Maximum number of digests, which take about 150 bytes each; the least recently used ones are dropped.
_MOST = 2**17
# Maximum number of servers for a beginning; the latest ones are kept.
_SERVERS = 8


class PrefixAffinity:
    """Remembers beginnings of prompts, by a chain of digests. Threads may use it at the same time."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._servers: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()  # by digest
        self._lock = threading.Lock()

    def known(self, prompt: bytes) -> dict[str, int]:
        """Returns how many of the prompt's first bytes each server was sent, for servers with any."""
        known: dict[str, int] = {}
        with self._lock:
            for length, digest in _chain(prompt):
                servers = self._servers.get(digest)
                if servers is None:
                    break
                known.update(dict.fromkeys(servers, length))
        return known

    def sent(self, prompt: bytes, server: str) -> None:
        """Records that a server gets the prompt."""
        with self._lock:
            for _, digest in _chain(prompt):
                others = [each for each in self._servers.pop(digest, ()) if each != server]
                self._servers[digest] = (server, *others[: _SERVERS - 1])
            while len(self._servers) > self._most:
                self._servers.popitem(last=False)


def _chain(prompt: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields length and digest of the beginnings of a prompt."""
    digest = b""
    for end in range(STEP_BYTES, min(len(prompt), _LONGEST_BYTES) + 1, STEP_BYTES):
        digest = hashlib.blake2b(digest + prompt[end - STEP_BYTES : end], digest_size=16).digest()
        yield end, digest
