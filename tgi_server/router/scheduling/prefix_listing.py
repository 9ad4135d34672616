"""Lists the files with cached prefixes in a folder, which other servers may share."""

import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tgi_server.prefix_files import Header, UnusableFile, file_of

# Only files with such names are ever deleted.
_NAME = re.compile(
    r"(?P<stem>(?P<layout>[0-9a-f]{16})-(?P<namespace>[0-9a-f]{16})-[0-9a-f]{32}\.(blocks|state))\.(?P<rank>\d{1,4})"
)
_UNFINISHED = re.compile(r"[A-Za-z0-9_]+\.unfinished")
_DAY = 86400
# Resolution of modification times: within it, a folder may change again without a new modification time.
_TICK_NS = 20_000_000


@dataclass(slots=True, eq=False)
class StoredFile:
    """The files of all shards with the same consecutive entries of a text: KV blocks, or one state snapshot.

    stem: the file name without the rank. namespace: digest of its cache namespace, as in the name. ranks: the shards
    that have written their file. size: bytes of all shards' files. used_at: time of the last use, in seconds since
    1970.
    digests: for each entry, the digest of the text up to its end; empty if this model cannot use the file.
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


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder at one time.

    files: all files, by stem. known: stems that were known before. damaged: files of this model that cannot be read.
    incomplete: files that some shards have not written; they may be writing them now. changed_at: the folder's
    modification time before it was read, in nanoseconds; 0 if a later change may have left that time unchanged.
    """

    files: dict[str, StoredFile]
    known: frozenset[str]
    damaged: list[StoredFile]
    incomplete: list[StoredFile]
    changed_at: int


def changed_at(folder: Path) -> int:
    """Returns the modification time of a folder, in nanoseconds: when files were last added, deleted or renamed."""
    return os.stat(folder).st_mtime_ns


def list_files(folder: Path, layout: str, shards: int, known: Mapping[str, int], now: float) -> Listing:
    """Lists a folder, and reads the headers of this model's files that are not known yet. Raises OSError.

    layout: digest of this model's layout, as in file names. known: sizes of known files, by stem. now: in seconds.

    Deletes unfinished files of servers that were killed.
    """
    before, began = changed_at(folder), time.time_ns()
    listing = Listing({}, frozenset(known), [], [], before if began - before > _TICK_NS else 0)
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # another server may delete, too
            _note(listing.files, entry, now)
    for file in listing.files.values():
        if not file.stem.startswith(layout) or known.get(file.stem) == file.size:
            continue
        if len(file.ranks) < shards:
            listing.incomplete.append(file)
        elif not _read(folder, file):
            listing.damaged.append(file)
    return listing


def _note(files: dict[str, StoredFile], entry: os.DirEntry[str], now: float) -> None:
    status = entry.stat(follow_symlinks=False)
    if _UNFINISHED.fullmatch(entry.name) and status.st_mtime < now - _DAY:
        os.unlink(entry.path)
    name = _NAME.fullmatch(entry.name)
    if name is None or not stat.S_ISREG(status.st_mode):
        return
    file = files.setdefault(name["stem"], StoredFile(name["stem"], name["namespace"]))
    file.ranks.add(int(name["rank"]))
    file.size += status.st_size
    file.used_at = max(file.used_at, status.st_mtime)


def _read(folder: Path, file: StoredFile) -> bool:
    """Reads the digests of a file from its header. Returns False if it is damaged, but True if it was just deleted."""
    try:
        descriptor = os.open(file_of(folder / file.stem, 0), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            file.digests = Header.read(descriptor).digests
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return True
    except (OSError, UnusableFile):
        return False
    return True
