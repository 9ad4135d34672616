"""Downloads all files of a source to a temporary folder, and moves them to their place only when all are complete."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from llm_functionalities.download.config import DownloadError, Source
from llm_functionalities.download.fetch import fetch
from llm_functionalities.download.unpack import is_archive, unpack

# The downloader's own folder inside a source's folder.
KEPT = ".downloads"


def fetch_source(
    source: Source,
    folder: Path,
    client: httpx2.Client,
    *,
    force: bool = False,
    allow_http: bool = False,
    log: Callable[[str], None] = print,
) -> bool:
    """Downloads the files of `source` to `folder`. Returns False if they were there already.

    The text-generation server never sees incomplete files: they are downloaded, verified and unpacked in a temporary
    folder on the same volume, and then renamed. Concurrent runs wait for each other.

    Raises DownloadError.
    """
    kept = folder / KEPT
    try:
        kept.mkdir(parents=True, exist_ok=True)
        with _alone(kept / f"{source.id}.lock", log):
            if not force and is_present(source, folder):
                return False
            aside = kept / f"{source.id}-{_version(source)}"
            _fetch_all(source, aside, client, log, allow_http)
            _publish(source, aside, folder)
    except PermissionError as error:
        raise DownloadError(
            f"{source.id}: {error}; run `sudo chown -R {os.getuid()}:{os.getgid()} {folder}`, with the host's name of "
            "the folder where it is a volume of a container"
        ) from None
    except OSError as error:
        raise DownloadError(f"{source.id}: {error}") from None
    return True


def _version(source: Source) -> str:
    """Returns eight digits that depend on the source's URLs, so that parts of different files are never mixed."""
    return hashlib.sha256(json.dumps(urls_of(source)).encode()).hexdigest()[:8]


def _fetch_all(
    source: Source, aside: Path, client: httpx2.Client, log: Callable[[str], None], allow_http: bool
) -> None:
    for file in source.urls:
        target = aside / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        fetch(client, file, target, log, allow_http=allow_http)
    if source.decompress:
        for file in source.urls:
            if is_archive(file.path):
                unpack(aside / file.path)
    for name, path in source.artefacts:
        if not (aside / path).exists():
            raise DownloadError(f"{source.id}: artefact {name} is not among the files: there is no {path}")


def _publish(source: Source, aside: Path, folder: Path) -> None:
    files = sorted(str(path.relative_to(aside)) for path in aside.rglob("*") if not path.is_dir())
    before = read_record(source, folder)
    own = {*files, *(before.files if before else [])}
    for entry in sorted(aside.iterdir()):
        _move(entry, folder / entry.name, own, folder)
    write_record(source, folder, files)
    for left in aside.parent.glob(f"{source.id}-????????"):
        shutil.rmtree(left)  # also those of earlier versions of the configuration


def _move(entry: Path, target: Path, own: set[str], folder: Path) -> None:
    """Renames `entry` to `target`. Replaces an existing one; merges folders if the target has other files."""
    if not target.exists():
        entry.rename(target)
    elif not entry.is_dir():
        entry.replace(target)
    elif target.is_dir() and _has_others(target, own, folder):
        for part in entry.iterdir():
            _move(part, target / part.name, own, folder)
    else:
        old = entry.with_name(f"{entry.name}.old")
        target.rename(old)
        entry.rename(target)
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def _has_others(target: Path, own: set[str], folder: Path) -> bool:
    return any(str(path.relative_to(folder)) not in own for path in target.rglob("*") if not path.is_dir())


@contextmanager
def _alone(lock: Path, log: Callable[[str], None]) -> Iterator[None]:
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"{lock.stem}: another process is fetching it; waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Record:
    """The files of a source in its folder, as relative paths, and the URLs from which they were downloaded."""

    urls: list[list[str | None]]
    files: list[str]


def urls_of(source: Source) -> list[list[str | None]]:
    return [[file.url, file.path, file.sha256] for file in source.urls]


def write_record(source: Source, folder: Path, files: list[str]) -> None:
    path = _path(source, folder)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"urls": urls_of(source), "files": files}, indent=1))
    fresh.replace(path)


def read_record(source: Source, folder: Path) -> Record | None:
    """Returns the record of a source; None if there is none that can be read."""
    try:
        kept = json.loads(_path(source, folder).read_text())
        return Record(kept["urls"], kept["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_present(source: Source, folder: Path) -> bool:
    """Returns True if all files of the source are in its folder.

    Files that were put there by hand count, too.
    """
    if (record := read_record(source, folder)) is not None:
        return record.urls == urls_of(source) and all((folder / path).exists() for path in record.files)
    unpacked = [file for file in source.urls if source.decompress and is_archive(file.path)]
    if unpacked and not source.artefacts:
        return False  # the content of the archives is unknown
    wanted = [file.path for file in source.urls if file not in unpacked] + [path for _, path in source.artefacts]
    return all((folder / path).exists() for path in wanted)


def _path(source: Source, folder: Path) -> Path:
    return folder / KEPT / f"{source.id}.json"
