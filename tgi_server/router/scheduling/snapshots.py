"""State snapshots in the shards. Models with recurrent layers can continue a cached prefix only from a snapshot."""

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from tgi_server.contract import StateSave
from tgi_server.router.scheduling.prefix_cache import Space

_WIDTH = 4  # bytes of a token
# Distances of a prompt's snapshots from its end, in blocks. The next turn may differ from a prompt before its end: chat
# templates write the end of a turn differently once another one follows.
_DISTANCES = (0, 4, 16, 64, 256)
# A prompt gets at most 1 / _SHARE_OF_ONE of the snapshots.
_SHARE_OF_ONE = 8


class Snapshots:
    """Snapshots 1 .. `count`: states after a prefix of a text. The least recently used are evicted.

    Prefixes are whole blocks, so that no block has to be copied.

    due: the saves of the call being built, by the number of the snapshot. lent: snapshots that are being written to
    files, or read from files, and must not change meanwhile.
    """

    def __init__(self, count: int, block_size: int, lent: Iterable[int] = ()) -> None:
        self.count = count
        self._block_size = block_size
        self.lent = set(lent)
        self._free = [number for number in range(count, 0, -1) if number not in self.lent]
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # by the digest of the text, oldest use first
        self.due: dict[int, StateSave] = {}

    def find(self, space: Space, tokens: bytes) -> tuple[int, int]:
        """Returns the length of the longest prefix of `tokens` (4 bytes each) that has a snapshot, and its number.

        Both are 0 if there is none. Snapshots that the call being built saves do not count yet.
        """
        width = self._block_size * _WIDTH
        text, found, number = _begin(space), b"", 0
        length = 0
        for end in range(width, len(tokens) + 1, width):
            text.update(tokens[end - width : end])
            digest = text.digest()
            if digest in self._numbers and self._numbers[digest] not in self.due:
                found, length = digest, end // _WIDTH
        if found:
            self._numbers.move_to_end(found)
            number = self._numbers[found]
        return length, number

    def lengths(self, known: int, parted: int) -> list[int]:
        """Returns the lengths at which to save the states of a prompt, in ascending order.

        known: number of its tokens. parted: number of its tokens that are cached: other prompts may differ from there
        on as well.
        """
        size = self._block_size
        last = (known - 1) // size * size
        wanted = [last, parted // size * size, *(last - blocks * size for blocks in _DISTANCES[1:])]
        chosen = list(dict.fromkeys(length for length in wanted if length > 0))
        return sorted(chosen[: max(1, self.count // _SHARE_OF_ONE)])

    def save(self, request_id: int, space: Space, tokens: bytes) -> None:
        """Has the call being built save a request's state after `tokens`, unless there is a snapshot of it."""
        digest = _digest(space, tokens)
        if digest not in self._numbers:
            if not (number := self._take()):
                return
            self._numbers[digest] = number
            self.due[number] = StateSave(request_id, len(tokens) // _WIDTH, number)
        self._numbers.move_to_end(digest)

    def _take(self) -> int:
        """Returns a free snapshot, or evicts the least recently used one; 0 if all are lent."""
        if self._free:
            return self._free.pop()
        oldest = next((each for each, number in self._numbers.items() if number not in self.lent), None)
        if oldest is None:
            return 0
        number = self._numbers.pop(oldest)
        self.due.pop(number, None)
        return number

    def drop(self, space: Space, tokens: bytes) -> None:
        """Drops the snapshot after `tokens`, if there is one."""
        number = self._numbers.pop(_digest(space, tokens), None)
        if number is not None:
            self.due.pop(number, None)
            if number not in self.lent:
                self._free.append(number)

    def after(self, space: Space, tokens: bytes) -> list[tuple[int, int]]:
        """Returns length and number of the snapshots after prefixes of `tokens`, the longest last."""
        width, text, found = self._block_size * _WIDTH, _begin(space), []
        for end in range(width, len(tokens) + 1, width):
            text.update(tokens[end - width : end])
            number = self._numbers.get(text.digest(), 0)
            if number and number not in self.due:
                found.append((end // _WIDTH, number))
        return found

    def lend(self, number: int) -> None:
        """Protects a snapshot from changes and eviction until `give_back`."""
        self.lent.add(number)

    def lend_free(self) -> int:
        """Returns a snapshot to write into until `give_back`; 0 if all are lent."""
        if number := self._take():
            self.lent.add(number)
        return number

    def put(self, space: Space, tokens: bytes, number: int) -> None:
        """Records that a lent snapshot has the state after `tokens`."""
        self._numbers.setdefault(_digest(space, tokens), number)

    def give_back(self, number: int) -> None:
        """Returns a snapshot of `lend` or `lend_free`."""
        self.lent.remove(number)
        if number not in self._numbers.values():
            self._free.append(number)

    def check(self) -> None:
        """Raises AssertionError unless each snapshot is free, lent, or after exactly one text."""
        numbers = [*self._free, *(self.lent | set(self._numbers.values()))]
        assert len(set(self._numbers.values())) == len(self._numbers), "a snapshot after two texts"
        assert sorted(numbers) == list(range(1, self.count + 1)), "a snapshot that is lost, or there twice"


def _digest(space: Space, tokens: bytes) -> bytes:
    text = _begin(space)
    text.update(tokens)
    return text.digest()


def _begin(space: Space) -> blake2b:
    return blake2b(f"{space!r}\n".encode(), digest_size=16)
