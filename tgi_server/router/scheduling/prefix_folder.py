"""A folder with files of cached prefixes: finds files by their texts, and selects files to delete for new ones.

A text is identified by a chain of digests, one for each block, computed from the digest before it and the block's
tokens. The chain starts with a digest of the model, the adapter and the namespace. All digests are keyed with a secret
in the folder, so the names of files alone reveal nothing. `tgi_server/prefix_files.py` defines the file format.
"""

import fcntl
import hashlib
import os
import stat
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tgi_server.prefix_files import DIGEST_BYTES, file_of
from tgi_server.router.scheduling.prefix_listing import Listing, StoredFile, changed_at, list_files

# The folder within the one that the settings name, and its files other than prefixes.
_FOLDER, _KEY, _LOCK = "oatmill-prefixes", "key", "lock"
_KEY_BYTES = 32
_WIDTH = 4  # bytes of a token


class PrefixFolder:
    """Index of the files in a folder that one model can use. Files of other models count towards the size, too.

    bytes: the bytes of all files. size: their maximum. writing: True while this server has the lock.

    Several servers may use a folder: all read, and one at a time writes. Only `open`, `listing`, `exists`, `delete` and
    `note_use` wait for the disk.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        layout: bytes,
        max_age_s: float,
        shards: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """layout: digest of the layout of the model's blocks. max_age_s: seconds without use after which files expire.
        shards: number of shards; each writes a file of its own for each text."""
        self.folder = folder / _FOLDER
        self.bytes = 0
        self.size = size
        self._layout = layout
        self._max_age_s = max_age_s
        self._shards = shards
        self._clock = clock
        self._key = b""
        self._lock = -1  # a descriptor
        self._listed_at = 0
        self.writing = False
        self._files: OrderedDict[str, StoredFile] = OrderedDict()  # by stem, the least recently used first
        self._entries: dict[tuple[bool, bytes], tuple[StoredFile, int]] = {}  # by (is a state, digest)

    def open(self) -> int:
        """Creates the folder if it does not exist, and lists it. Returns how many damaged files were deleted.

        Raises OSError, also for a folder that others may write to.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self.folder.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise OSError(f"{self.folder} is not a folder that only this user can read and write")
        self._key = self._read_key()
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        alone = self.lock()
        listing = self.listing()
        self.delete(self.take(listing))
        if alone:  # otherwise a file that is incomplete may be being written
            self.delete([*map(self.drop, listing.incomplete), *self.expired(), *self.make_room(0)])
            self.unlock()
        return len(listing.damaged) + (len(listing.incomplete) if alone else 0)

    def close(self) -> None:
        """Closes the lock file, and so releases the lock."""
        self.writing = False
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1

    def lock(self) -> bool:
        """Returns False if another server has the lock. Otherwise this one has it until `unlock`, or until it ends."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self.writing = True
        return True

    def unlock(self) -> None:
        """Releases the lock. Changes made meanwhile are this server's, so the folder need not be listed again."""
        with suppress(OSError):
            self._listed_at = changed_at(self.folder)
        self.writing = False
        fcntl.flock(self._lock, fcntl.LOCK_UN)

    @property
    def changed(self) -> bool:
        """True if files may have been added or deleted since the folder was listed."""
        try:
            return changed_at(self.folder) != self._listed_at
        except OSError:
            return False

    def listing(self) -> Listing:
        """Reads the folder, for `take`. Raises OSError."""
        known = {stem: file.size for stem, file in list(self._files.items())}
        return list_files(self.folder, self._own, self._shards, known, self._clock())

    def take(self, listing: Listing) -> list[StoredFile]:
        """Updates the index by files that others have added, deleted or used. Returns damaged files, for `delete`."""
        for stem in listing.known - listing.files.keys():
            if (gone := self._files.get(stem)) is not None:
                self.drop(gone)
        used = False
        for stem, file in listing.files.items():
            known = self._files.get(stem)
            if known is not None and known.size == file.size:
                used |= file.used_at > known.used_at
                known.used_at = max(known.used_at, file.used_at)
            elif known is None or stem in listing.known:  # or this server has written it meanwhile
                if known is not None:
                    self.drop(known)
                self._note(file)
                used = True
        if used:
            self._files = OrderedDict(sorted(self._files.items(), key=lambda item: item[1].used_at))
        self._listed_at = listing.changed_at
        return [self.drop(file) for file in listing.damaged]

    def secret(self, purpose: str) -> bytes:
        """Returns a secret for a purpose, which stays the same as long as the folder exists."""
        return hashlib.blake2b(purpose.encode(), key=self._key).digest()[:_KEY_BYTES]

    def namespace(self, name: str) -> str:
        """Returns the digest of a cache namespace that names of files contain."""
        return hashlib.blake2b(b"namespace" + name.encode(), key=self._key, digest_size=8).hexdigest()

    def root(self, adapter: str, namespace: str) -> bytes:
        """Returns the digest of the empty text. Texts with different adapters or namespaces share nothing."""
        text = repr((self._layout, adapter, namespace)).encode()
        return hashlib.blake2b(text, key=self._key, digest_size=DIGEST_BYTES).digest()

    def chain(self, root: bytes, tokens: bytes, block_size: int) -> Iterator[bytes]:
        """Yields the digest after each whole block of a text. tokens: 4 bytes each."""
        width = block_size * _WIDTH
        for end in range(width, len(tokens) + 1, width):
            root = hashlib.blake2b(root + tokens[end - width : end], key=self._key, digest_size=DIGEST_BYTES).digest()
            yield root

    def find(self, digest: bytes, *, state: bool = False) -> tuple[StoredFile, int] | None:
        """Returns the file with the block (or state) at the end of a text, and its index there; None if there is none.

        digest: the digest after the text's last block.
        """
        return self._entries.get((state, digest))

    def new_file(self, namespace: str, digests: Iterable[bytes], *, state: bool = False) -> StoredFile:
        """Returns a new file that is not in the index until `add`. digests: of its blocks, or of its state."""
        digests = tuple(digests)
        name = f"{self._own}-{namespace}-{digests[-1].hex()}.{'state' if state else 'blocks'}"
        return StoredFile(name, namespace, digests=digests)

    def path(self, file: StoredFile) -> Path:
        """Returns the path of a file, to which each shard adds its rank."""
        return self.folder / file.stem

    def add(self, file: StoredFile) -> None:
        """Adds a file that has been written to the index."""
        if (earlier := self._files.get(file.stem)) is not None:
            self.drop(earlier)
        file.used_at = self._clock()
        self._note(file)

    def use(self, files: Iterable[StoredFile]) -> list[StoredFile]:
        """Records that a text was read from these files, in its order. Returns those that are still in the index.

        The first files are deleted last: the others are of no use without them.
        """
        used = [file for file in files if self._files.get(file.stem) is file]
        for file in reversed(used):
            self._files.move_to_end(file.stem)
            file.used_at = self._clock()
        return used

    def make_room(self, size: int) -> list[StoredFile]:
        """Drops the least recently used files until there is room for `size` bytes. Returns them, for `delete`."""
        dropped = []
        while self._files and self.bytes + size > self.size:
            dropped.append(self.drop(next(iter(self._files.values()))))
        return dropped

    def expired(self) -> list[StoredFile]:
        """Drops the expired files. Returns them, for `delete`."""
        oldest = self._clock() - self._max_age_s
        expired = []
        for file in list(self._files.values()):
            if file.used_at >= oldest:
                break
            expired.append(self.drop(file))
        return expired

    def forget(self, namespace: str) -> list[StoredFile]:
        """Drops all files of a namespace, also those of other models. Returns them, for `delete`."""
        name = self.namespace(namespace)
        return [self.drop(file) for file in list(self._files.values()) if file.namespace == name]

    def drop(self, file: StoredFile) -> StoredFile:
        """Removes a file from the index. Returns it, for `delete`."""
        if self._files.get(file.stem) is file:
            del self._files[file.stem]
            self.bytes -= file.size
        for digest in file.digests:
            if self._entries.get((file.has_state, digest), (None,))[0] is file:
                del self._entries[file.has_state, digest]
        return file

    def delete(self, files: Iterable[StoredFile]) -> None:
        """Deletes files from the disk, which are no longer in the index."""
        for file in files:
            for rank in file.ranks:
                with suppress(OSError):
                    file_of(self.path(file), rank).unlink()

    def exists(self, file: StoredFile) -> bool:
        """Returns False if another server has deleted the file."""
        return file_of(self.path(file), 0).exists()

    def note_use(self, files: Iterable[StoredFile]) -> None:
        """Stores the time of the last use in the files, for later starts."""
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

    @property
    def _own(self) -> str:
        """The beginning of the names of this model's files."""
        return self._layout.hex()[:16]

    def _note(self, file: StoredFile) -> None:
        self._files[file.stem] = file
        self.bytes += file.size
        for place, digest in enumerate(file.digests):
            self._entries[file.has_state, digest] = file, place
