"""How far shards are with loading: each says so in a small file beside its socket, which router and launcher read."""

import contextlib
import glob
from collections.abc import Mapping
from pathlib import Path

IMPORTING, READING, ROUNDING = "importing", "reading weights", "rounding weights"
PACKING, WARMING_UP = "packing weights", "warming up"
# The percents at which the stages begin and end.
_SPANS: Mapping[str, tuple[int, int]] = {
    IMPORTING: (0, 15),
    READING: (15, 50),
    ROUNDING: (16, 50),
    PACKING: (50, 90),
    WARMING_UP: (90, 100),
}
_SUFFIX = "-loading"


def percent_of(stage: str, fraction: float) -> int:
    """Returns the percent of all loading, for a fraction of one stage. An unknown stage counts as nothing."""
    begin, end = _SPANS.get(stage, (0, 0))
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
    return (percent_of(WARMING_UP, 0), WARMING_UP) if first_socket.exists() else (0, IMPORTING)


def remove_progress(socket: Path) -> None:
    """Removes the file of a shard that has loaded, or has ended."""
    with contextlib.suppress(OSError):
        progress_file(socket).unlink(missing_ok=True)
