"""How far shards are with loading: each says so in a small file beside its socket, which router and launcher read."""

import contextlib
import glob
from collections.abc import Mapping
from pathlib import Path

IMPORTING, READING, PACKING, WARMING_UP = "importing", "reading weights", "packing weights", "warming up"
# The percents at which the stages begin.
_BEGINS: Mapping[str, int] = {IMPORTING: 0, READING: 15, PACKING: 50, WARMING_UP: 90}
_SUFFIX = "-loading"


def percent_of(stage: str, fraction: float) -> int:
    """Returns the percent of all loading, for a fraction of one stage. An unknown stage counts as nothing."""
    begins = sorted(_BEGINS.values())
    begin = _BEGINS.get(stage, 0)
    end = next((each for each in begins if each > begin), 100)
    return begin + int(min(max(fraction, 0.0), 1.0) * (end - begin))


def progress_file(socket: Path) -> Path:
    """Returns where the shard that is going to listen on `socket` says how far it is."""
    return socket.with_name(f"{socket.name}{_SUFFIX}")


def write_progress(socket: Path, percent: int, stage: str) -> None:
    """Says how far the shard is. A folder that cannot be written to is no reason to stop."""
    file = progress_file(socket)
    unfinished = file.with_name(f"{file.name}.partial")
    with contextlib.suppress(OSError):
        unfinished.write_text(f"{percent} {stage}")
        unfinished.replace(file)


def read_progress(first_socket: Path) -> tuple[int, str]:
    """Returns percent and stage of the shard, of those on this machine, that is least far.

    first_socket: of one of them, whose name ends in `-RANK`. Shards that listen have no file any more.
    """
    prefix = glob.escape(first_socket.name.rpartition("-")[0])
    found = []
    for file in first_socket.parent.glob(f"{prefix}-*{_SUFFIX}"):
        with contextlib.suppress(OSError, ValueError):
            percent, _, stage = file.read_text().partition(" ")
            found.append((int(percent), stage))
    if found:
        return min(found)
    return (_BEGINS[WARMING_UP], WARMING_UP) if first_socket.exists() else (0, IMPORTING)


def remove_progress(socket: Path) -> None:
    """Removes the file of a shard that has loaded, or has ended."""
    with contextlib.suppress(OSError):
        progress_file(socket).unlink(missing_ok=True)
