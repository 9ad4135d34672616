"""A folder with files of cached prefixes: which texts they have, and which are deleted when there is no more room.

A text is known by a chain of digests, one for each of its blocks, each of the digest before it and the block's tokens.
The first is made of what tells apart texts that share nothing. All are keyed with a secret in the folder, so that names
of files say nothing to who cannot read them. `tgi_server/prefix_files.py` has the form of a file.
"""

import hashlib
import os
import re
import stat
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tgi_server.prefix_files import DIGEST_BYTES, Header, UnusableFile, file_of

# The folder within the one that the settings name. Nothing else is ever deleted than files in it with such names.
_FOLDER, _KEY = "oatmill-prefixes", "key"
_NAME = re.compile(
    r"(?P<stem>(?P<layout>[0-9a-f]{16})-(?P<namespace>[0-9a-f]{16})-[0-9a-f]{32}\.(blocks|state))\.(?P<rank>\d{1,4})"
)
_UNFINISHED = re.compile(r"[A-Za-z0-9_]+\.unfinished")
_KEY_BYTES = 32
_DAY = 86400
_WIDTH = 4  # bytes of a token


@dataclass(slots=True, eq=False)
class StoredFile:
    """The files of all shards with consecutive entries of a text.

    stem: the name without the rank. namespace: of the texts that may share it, as names of files have it. ranks: that
    have written it. size: bytes of all. digests: of the text up to the end of each entry; none of
    a file that this model cannot use.
    """

    stem: str
    namespace: str
    ranks: set[int] = field(default_factory=set)
    size: int = 0
    used_at: float = 0.0
    digests: tuple[bytes, ...] = ()

    @property
    def has_state(self) -> bool:
        """True for a snapshot of states, False for blocks."""
        return self.stem.endswith(".state")


class PrefixFolder:
    """Knows the files in a folder, for one model, and has those of others deleted with its own, the oldest first.

    bytes: of all files. size: the most that they may have.

    Methods do not touch the disk, but for `open`, `delete` and `note_use`, which may wait for it.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        layout: bytes,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """layout: of the blocks of the model. max_age_s: since a file was used last."""
        self.folder = folder / _FOLDER
        self.bytes = 0
        self.size = size
        self._layout = layout
        self._max_age_s = max_age_s
        self._clock = clock
        self._key = b""
        self._files: OrderedDict[str, StoredFile] = OrderedDict()  # by stem, the least recently used first
        self._entries: dict[tuple[bool, bytes], tuple[StoredFile, int]] = {}  # by (is a state, digest)

    def open(self) -> int:
        """Reads the folder, which is made if it is not there. Returns how many damaged files were deleted.

        Raises OSError, also for a folder that others may write to.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise OSError(f"{self.folder} is not a folder that only this user can read and write")
        self._key = self._read_key()
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):  # another server may delete, too
                self._note(entry)
        self._files = OrderedDict(sorted(self._files.items(), key=lambda item: item[1].used_at))
        damaged = [file for file in self._files.values() if self._is_own(file) and not self._read(file)]
        self.delete([*map(self.drop, damaged), *self.expired(), *self.make_room(0)])
        return len(damaged)

    def secret(self, purpose: str) -> bytes:
        """Returns a secret that stays the same as long as the folder does, another for each purpose."""
        return hashlib.blake2b(purpose.encode(), key=self._key).digest()[:_KEY_BYTES]

    def namespace(self, name: str) -> str:
        """Returns what names of files have in place of a cache namespace."""
        return hashlib.blake2b(b"namespace" + name.encode(), key=self._key, digest_size=8).hexdigest()

    def root(self, adapter: str, namespace: str) -> bytes:
        """Returns the digest of the empty text. adapter, namespace: texts with other ones share nothing."""
        text = repr((self._layout, adapter, namespace)).encode()
        return hashlib.blake2b(text, key=self._key, digest_size=DIGEST_BYTES).digest()

    def chain(self, root: bytes, tokens: bytes, block_size: int) -> Iterator[bytes]:
        """Yields the digest after each whole block of a text. tokens: 4 bytes each."""
        width = block_size * _WIDTH
        for end in range(width, len(tokens) + 1, width):
            root = hashlib.blake2b(root + tokens[end - width : end], key=self._key, digest_size=DIGEST_BYTES).digest()
            yield root

    def find(self, digest: bytes, *, state: bool = False) -> tuple[StoredFile, int] | None:
        """Returns the file with the block, or the state, at the end of a text, and its place there; None: no file."""
        return self._entries.get((state, digest))

    def new_file(self, namespace: str, digests: Iterable[bytes], *, state: bool = False) -> StoredFile:
        """Returns a file that is about to be written. It counts once it is added."""
        digests = tuple(digests)
        name = f"{self._layout.hex()[:16]}-{namespace}-{digests[-1].hex()}.{'state' if state else 'blocks'}"
        return StoredFile(name, namespace, digests=digests)

    def path(self, file: StoredFile) -> Path:
        """Returns the path to which each shard adds its rank."""
        return self.folder / file.stem

    def add(self, file: StoredFile) -> None:
        """Notes a file that has been written."""
        if (earlier := self._files.get(file.stem)) is not None:
            self.drop(earlier)
        file.used_at = self._clock()
        self._files[file.stem] = file
        self.bytes += file.size
        self._index(file)

    def use(self, files: Iterable[StoredFile]) -> list[StoredFile]:
        """Notes that a text was read from these files, in its order. Returns those that are still there.

        The first ones are deleted last: without them the others could not be reached.
        """
        used = [file for file in files if self._files.get(file.stem) is file]
        for file in reversed(used):
            self._files.move_to_end(file.stem)
            file.used_at = self._clock()
        return used

    def make_room(self, size: int) -> list[StoredFile]:
        """Forgets the least recently used files until there is room for `size` bytes. Returns them, to be deleted."""
        dropped = []
        while self._files and self.bytes + size > self.size:
            dropped.append(self.drop(next(iter(self._files.values()))))
        return dropped

    def expired(self) -> list[StoredFile]:
        """Forgets the files that were not used for too long. Returns them, to be deleted."""
        oldest = self._clock() - self._max_age_s
        expired = []
        for file in list(self._files.values()):
            if file.used_at >= oldest:
                break
            expired.append(self.drop(file))
        return expired

    def forget(self, namespace: str) -> list[StoredFile]:
        """Forgets all files of a namespace, those of other models, too. Returns them, to be deleted."""
        name = self.namespace(namespace)
        return [self.drop(file) for file in list(self._files.values()) if file.namespace == name]

    def drop(self, file: StoredFile) -> StoredFile:
        """Forgets a file. Returns it, to be deleted."""
        if self._files.get(file.stem) is file:
            del self._files[file.stem]
            self.bytes -= file.size
        for digest in file.digests:
            if self._entries.get((file.has_state, digest), (None,))[0] is file:
                del self._entries[file.has_state, digest]
        return file

    def delete(self, files: Iterable[StoredFile]) -> None:
        """Deletes files that were forgotten."""
        for file in files:
            for rank in file.ranks:
                with suppress(OSError):
                    file_of(self.path(file), rank).unlink()

    def note_use(self, files: Iterable[StoredFile]) -> None:
        """Writes down when files were used last, for later starts."""
        for number, file in enumerate(files):
            with suppress(OSError):
                os.utime(file_of(self.path(file), min(file.ranks)), (file.used_at, file.used_at - number / 1000))

    def _read_key(self) -> bytes:
        place = self.folder / _KEY
        if not place.exists():
            descriptor, unfinished = tempfile.mkstemp(suffix=".unfinished", prefix="", dir=self.folder)
            with open(descriptor, "wb") as file:
                file.write(os.urandom(_KEY_BYTES))
            with suppress(FileExistsError):  # another server is faster
                os.link(unfinished, place)
            os.unlink(unfinished)
        key = place.read_bytes()
        if len(key) != _KEY_BYTES:
            raise OSError(f"{place} is damaged; delete {self.folder}")
        return key

    def _note(self, entry: os.DirEntry[str]) -> None:
        status = entry.stat(follow_symlinks=False)
        if _UNFINISHED.fullmatch(entry.name) and status.st_mtime < self._clock() - _DAY:
            os.unlink(entry.path)
        name = _NAME.fullmatch(entry.name)
        if name is None or not stat.S_ISREG(status.st_mode):
            return
        file = self._files.setdefault(name["stem"], StoredFile(name["stem"], name["namespace"]))
        file.ranks.add(int(name["rank"]))
        file.size += status.st_size
        file.used_at = max(file.used_at, status.st_mtime)
        self.bytes += status.st_size

    def _is_own(self, file: StoredFile) -> bool:
        return file.stem.startswith(self._layout.hex()[:16])

    def _read(self, file: StoredFile) -> bool:
        """Indexes a file by its header. Returns False for one that is damaged."""
        try:
            descriptor = os.open(file_of(self.path(file), 0), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                file.digests = Header.read(descriptor).digests
            finally:
                os.close(descriptor)
        except (OSError, UnusableFile):
            return False
        self._index(file)
        return True

    def _index(self, file: StoredFile) -> None:
        for place, digest in enumerate(file.digests):
            self._entries[file.has_state, digest] = file, place
