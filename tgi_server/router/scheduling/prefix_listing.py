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
# Resolution of modification times: within it, a folder may change again and keep its modification time.
_TICK_NS = 20_000_000


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


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a folder at a time.

    files: by stem. known: stems that were known before. damaged: files of this
    model that it cannot read. incomplete: files that lack those of some shards, which may be written now. changed_at:
    the folder's time of change before it was read; 0 if it may have changed again since without another time.
    """

    files: dict[str, StoredFile]
    known: frozenset[str]
    damaged: list[StoredFile]
    incomplete: list[StoredFile]
    changed_at: int


def changed_at(folder: Path) -> int:
    """Returns when files came, went or were renamed last, in nanoseconds."""
    return os.stat(folder).st_mtime_ns


def list_files(folder: Path, layout: str, shards: int, known: Mapping[str, int], now: float) -> Listing:
    """Reads a folder, and the headers of files with this layout that are not known. Raises OSError.

    layout: of this model, as names have it. known: sizes of known files, by stem. now: in seconds.
    Leftovers of servers that were killed are deleted.
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
    """Notes the digests of a file. Returns False for one that is damaged; one that was just deleted has none."""
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
