"""What a source has put into its folder: kept beside it, so that the next run knows."""

import json
from dataclasses import dataclass
from pathlib import Path

from llm_functionalities.download.config import Source
from llm_functionalities.download.unpack import is_archive

KEPT = ".downloads"
"""The downloader's own folder inside a source's folder."""


@dataclass(frozen=True)
class Record:
    """`urls` as they were when `files` (relative paths) were fetched from them."""

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
    """None when nothing is known about the source, or nothing that can be read."""
    try:
        kept = json.loads(_path(source, folder).read_text())
        return Record(kept["urls"], kept["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_present(source: Source, folder: Path) -> bool:
    """Whether all that the source stands for is in its folder.

    Files that somebody else put there count, too: that is how a model gets into a volume by hand.
    """
    if (record := read_record(source, folder)) is not None:
        return record.urls == urls_of(source) and all((folder / path).exists() for path in record.files)
    unpacked = [file for file in source.urls if source.decompress and is_archive(file.path)]
    if unpacked and not source.artefacts:
        return False  # nothing says what was in them
    wanted = [file.path for file in source.urls if file not in unpacked] + [path for _, path in source.artefacts]
    return all((folder / path).exists() for path in wanted)


def _path(source: Source, folder: Path) -> Path:
    return folder / KEPT / f"{source.id}.json"
