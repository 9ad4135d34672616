"""Finds the files that continue the cached part of a prompt."""

from dataclasses import dataclass

from tgi_server.router.scheduling.memory import PagedMemory, space_of
from tgi_server.router.scheduling.prefix_cache import Space
from tgi_server.router.scheduling.prefix_folder import PrefixFolder, StoredFile
from tgi_server.router.scheduling.sequence import Sequence

WIDTH = 4  # bytes of a token


@dataclass(frozen=True, slots=True)
class CachedText:
    """A text whose blocks are cached. adapter: digest of the adapter's files. tokens: 4 bytes each.

    named: True if all of its blocks are worth writing, however few are not on disk.
    """

    space: Space
    adapter: str
    namespace: str
    tokens: bytes
    named: bool


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Entries on disk that continue the cached part of a prompt.

    text: the prompt up to the end of these entries. cached: its blocks in memory. places: file and index of each
    further block. digests: the digest after each of these. state: file and digest of the state after the text; None if
    sequences have no states, or it is in memory. gained: number of tokens that need not be computed thanks to the
    entries.
    """

    text: CachedText
    cached: list[int]
    places: list[tuple[StoredFile, int]]
    digests: list[bytes]
    state: tuple[StoredFile, bytes] | None
    gained: int

    @property
    def length(self) -> int:
        """Number of tokens of the text."""
        return len(self.text.tokens) // WIDTH

    @property
    def files(self) -> list[StoredFile]:
        state = [] if self.state is None else [self.state[0]]
        return [*dict.fromkeys(file for file, _ in self.places), *state]

    def runs(self) -> list[tuple[StoredFile, int, int]]:
        """Returns the runs of consecutive blocks in files: (file, index of the first entry, number of entries)."""
        runs: list[tuple[StoredFile, int, int]] = []
        for file, place in self.places:
            if runs and runs[-1][0] is file and runs[-1][1] + runs[-1][2] == place:
                runs[-1] = file, runs[-1][1], runs[-1][2] + 1
            else:
                runs.append((file, place, 1))
        return runs


def find_stored(folder: PrefixFolder, memory: PagedMemory, sequence: Sequence) -> StoredPrefix | None:
    """Returns the entries that continue the cached part of a sequence; None if there are none."""
    adapter = stored_adapter(sequence)
    if adapter is None:
        return None
    namespace, snapshots = sequence.request.cache_namespace, memory.snapshots
    space, size = space_of(sequence), memory.block_size
    # The last token is computed. Its block may be read for those before it, but a state after it is of no use.
    tokens = sequence.beginning(sequence.known if snapshots is None else sequence.known - 1)
    cached = memory.cached_blocks(space, tokens)
    states = None if snapshots is None else dict(snapshots.after(space, tokens[: len(cached) * size * WIDTH]))
    usable = len(cached) if states is None else max(states, default=0) // size
    digests: list[bytes] = []
    places: list[tuple[StoredFile, int]] = []
    end, state = 0, None  # blocks and state of the longest prefix from which the prompt can continue
    for number, digest in enumerate(folder.chain(folder.root(adapter, namespace), tokens, size), start=1):
        if number > len(cached):
            if (place := folder.find(digest)) is None:
                break
            digests.append(digest)
            places.append(place)
        stored = None if states is None else folder.find(digest, state=True)
        if number > usable and (states is None or stored is not None):
            end, state = number, None if stored is None else (stored[0], digest)
    if not end:
        return None
    read = max(0, end - len(cached))
    text = CachedText(space, adapter, namespace, tokens[: end * size * WIDTH], named=False)
    return StoredPrefix(text, cached[:end], places[:read], digests[:read], state, (end - usable) * size)


def stored_adapter(sequence: Sequence) -> str | None:
    """Returns the digest of the sequence's adapter, "" without an adapter; None if its texts cannot be stored."""
    return "" if sequence.adapter is None else sequence.adapter.digest or None
