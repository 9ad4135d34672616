"""Archives, unpacked without leaving their folder."""

import bz2
import gzip
import lzma
import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path

from llm_functionalities.download.errors import DownloadError

LARGEST_BYTES = 1 << 40
"""More than any model: an archive that unpacks to more is a bomb."""

PIECE_BYTES = 1 << 20
_BROKEN = (
    *(tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError),
    *(EOFError, RuntimeError, ValueError, OSError),
)
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


def is_archive(name: str) -> bool:
    """By its local name, as the format of `downloads.toml` has it."""
    return name.endswith((*TARS, ".zip", ".gz", ".bz2"))


def unpack(archive: Path) -> None:
    """Puts what is in `archive` beside it, and removes it.

    Nothing is written outside of the archive's folder: no member with an absolute path, a `..`, or a link that leads
    out of it; no device or other special file. Raises DownloadError.
    """
    folder = archive.parent
    try:
        if archive.name.endswith(TARS):
            with tarfile.open(archive) as tar:
                _check_size(sum(member.size for member in tar.getmembers()), archive)
                tar.extractall(folder, filter="data")
        elif archive.name.endswith(".zip"):
            _unpack_zip(archive, folder)
        elif archive.name.endswith(".gz"):
            with gzip.open(archive) as content:
                _copy(content, archive.with_suffix(""))
        else:
            with bz2.open(archive) as content:
                _copy(content, archive.with_suffix(""))
    except tarfile.FilterError as error:
        raise DownloadError(f"{archive.name} would write outside of its folder: {error}") from None
    except _BROKEN as error:
        raise DownloadError(f"{archive.name} cannot be unpacked: {error}") from None
    archive.unlink()


def _unpack_zip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as content:
        _check_size(sum(member.file_size for member in content.infolist()), archive)
        root = folder.resolve()
        for member in content.infolist():
            target = (root / member.filename).resolve()
            if not target.is_relative_to(root) or "\\" in member.filename:
                raise DownloadError(f"{archive.name} would write outside of its folder: {member.filename!r}")
            if member.is_dir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            with content.open(member) as source, target.open("wb") as output:
                shutil.copyfileobj(source, output, PIECE_BYTES)


def _copy(content: gzip.GzipFile | bz2.BZ2File, target: Path) -> None:
    written = 0
    with target.open("wb") as output:
        while piece := content.read(PIECE_BYTES):
            written += len(piece)
            _check_size(written, target)
            output.write(piece)


def _check_size(size: int, archive: Path) -> None:
    if size > LARGEST_BYTES:
        raise DownloadError(f"{archive.name} unpacks to more than {LARGEST_BYTES} bytes")
