"""Unpacks archives, only into their own folder, and within limits for archives of models."""

import bz2
import gzip
import lzma
import os
import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

from llm_functionalities.download.config import DownloadError

# An archive may unpack to FREE_BYTES plus LARGEST_RATIO times its own size, and to at most LARGEST_BYTES. Weights
# hardly compress, vocabularies about ten times.
LARGEST_BYTES = 1 << 40
LARGEST_RATIO = 20
FREE_BYTES = 64 << 20
MAX_MEMBERS = 10_000

# Maximum bytes that are read into memory at once. No genuine archive has a header of this size.
LONGEST_READ = 1 << 24

PIECE_BYTES = 1 << 20
_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(EOFError, RuntimeError, ValueError, OSError),
)
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def is_archive(name: str) -> bool:
    """Returns True if a file's local name ends like that of an archive."""
    return name.endswith((*TARS, ".zip", ".gz", ".bz2"))


def unpack(archive: Path) -> None:
    """Unpacks `archive` into its folder, and deletes it.

    Refuses members that would be written outside of the folder: absolute paths, `..`, and links that lead out of it;
    also devices and other special files. Raises DownloadError.
    """
    folder = archive.parent
    try:
        limit = _Limit(archive)
        if archive.name.endswith(".zip"):
            _unpack_zip(archive, folder, limit)
        else:
            with _open(archive) as content:
                if archive.name.endswith(TARS):
                    _unpack_tar(_Content(content, limit), folder, limit)
                else:
                    _copy(_Content(content, limit), archive.with_suffix(""))
    except _BROKEN as error:
        raise DownloadError(f"{archive.name} cannot be unpacked: {error}") from None
    archive.unlink()


class _Limit:
    """The limits of one archive. Its methods raise DownloadError beyond them."""

    def __init__(self, archive: Path) -> None:
        self.name = archive.name
        self._bytes = min(LARGEST_BYTES, FREE_BYTES + LARGEST_RATIO * archive.stat().st_size)
        self._free = shutil.disk_usage(archive.parent).free
        self._members = 0

    def check_bytes(self, size: int) -> None:
        if size > self._bytes:
            raise DownloadError(
                f"{self.name} unpacks to more than {self._bytes} bytes, too much for an archive of its size; "
                "unpack it by hand if you trust it, or set decompress = false"
            )
        if size > self._free:
            raise DownloadError(f"{self.name} unpacks to more than the {self._free} bytes that the disk has left")

    def check_member(self, name: str) -> None:
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise DownloadError(f"{self.name} has more than {MAX_MEMBERS} members")
        if ".." in PurePosixPath(name).parts or "\\" in name or "\0" in name:
            raise self.outside(name)

    def outside(self, name: str) -> DownloadError:
        return DownloadError(f"{self.name} would write outside of its folder: {name[:200]!r}")


class _Content:
    """The unpacked bytes of a file. Reading them raises DownloadError beyond the limit."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile, limit: _Limit) -> None:
        self._file = file
        self._limit = limit

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= LONGEST_READ:
            raise DownloadError(f"{self._limit.name} has a header of {size} bytes; it is damaged or malicious")
        piece = self._file.read(size)
        self._limit.check_bytes(self._file.tell())
        return piece

    def seek(self, position: int) -> int:
        self._limit.check_bytes(position)
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()


def _open(archive: Path) -> IO[bytes] | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile:
    if archive.name.endswith((".gz", ".tgz")):
        return gzip.open(archive)
    if archive.name.endswith(".bz2"):
        return bz2.open(archive)
    return lzma.open(archive) if archive.name.endswith(".xz") else archive.open("rb")


def _unpack_tar(content: _Content, folder: Path, limit: _Limit) -> None:
    size = 0
    with tarfile.open(fileobj=content, mode="r:") as tar:  # type: ignore[call-overload]
        for member in tar:
            limit.check_member(member.name)
            size += member.size
            limit.check_bytes(size)
            # No member is written through a link, and a link's `..` come first, so links cannot lead out of the folder.
            if any((folder / parent).is_symlink() for parent in PurePosixPath(member.name.lstrip("/")).parents):
                raise limit.outside(member.name)
            if member.issym() or member.islnk():
                _check_link(member, limit)
            _extract(tar, member, folder, limit)


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, limit: _Limit) -> None:
    """Extracts a member into the folder, with the owner, permissions and time of a new file.

    Python's own `filter="data"` does more, but not every Python 3.11 has it, and long paths can circumvent its check of
    links (CVE-2025-4517).
    """
    target = folder / member.name.lstrip("/")
    if member.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if member.issym():
        target.symlink_to(member.linkname)
    elif member.islnk():
        linked = PurePosixPath(member.linkname)
        if any((folder / path).is_symlink() for path in (linked, *linked.parents)):
            raise limit.outside(member.linkname)
        target.hardlink_to(folder / linked)
    elif (content := tar.extractfile(member)) is not None:
        with content, target.open("xb") as output:
            shutil.copyfileobj(content, output, PIECE_BYTES)
    else:
        raise limit.outside(member.name)  # a device, or another special file


def _check_link(member: tarfile.TarInfo, limit: _Limit) -> None:
    parts = PurePosixPath(member.linkname).parts
    upwards = next((number for number, part in enumerate(parts) if part != ".."), len(parts))
    depth = len(PurePosixPath(os.path.normpath(member.name.lstrip("/"))).parts) - 1 if member.issym() else 0
    if member.linkname.startswith("/") or ".." in parts[upwards:] or upwards > depth:
        raise limit.outside(member.name)


def _unpack_zip(archive: Path, folder: Path, limit: _Limit) -> None:
    with zipfile.ZipFile(archive) as content:
        limit.check_bytes(sum(member.file_size for member in content.infolist()))
        root = folder.resolve()
        for member in content.infolist():
            limit.check_member(member.filename)
            target = root / member.filename
            if not target.resolve().is_relative_to(root):
                raise limit.outside(member.filename)
            if member.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with content.open(member) as source, target.open("wb") as output:
                shutil.copyfileobj(source, output, PIECE_BYTES)


def _copy(content: _Content, target: Path) -> None:
    with target.open("wb") as output:
        while piece := content.read(PIECE_BYTES):
            output.write(piece)
