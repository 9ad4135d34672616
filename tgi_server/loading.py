"""Loading progress: each shard writes it to a file beside its socket, which router and launcher read."""

import contextlib
import glob
from collections.abc import Mapping
from pathlib import Path

IMPORTING, COMPILING = "importing", "compiling kernels"
READING, ROUNDING = "reading weights", "rounding weights"
PACKING, WARMING_UP = "packing weights", "warming up"
# The percents at which the stages begin and end.
_SPANS: Mapping[str, tuple[int, int]] = {
    IMPORTING: (0, 15),
    COMPILING: (7, 15),
    READING: (15, 50),
    ROUNDING: (16, 50),
    PACKING: (50, 90),
    WARMING_UP: (90, 100),
}
_SUFFIX = "-loading"


def percent_of(stage: str, fraction: float) -> int:
    """Returns the percentage of the whole loading, for a fraction of one stage; 0 for an unknown stage."""
    begin, end = _SPANS.get(stage, (0, 0))
    return begin + int(min(max(fraction, 0.0), 1.0) * (end - begin))


def progress_file(socket: Path) -> Path:
    """Returns the progress file of the shard that will listen on `socket`."""
    return socket.with_name(f"{socket.name}{_SUFFIX}")


def write_progress(socket: Path, percent: int, stage: str) -> None:
    """Writes the shard's progress. Errors of the file system are ignored."""
    file = progress_file(socket)
    unfinished = file.with_name(f"{file.name}.partial")
    with contextlib.suppress(OSError):
        unfinished.write_text(f"{percent} {stage}")
        unfinished.replace(file)


def read_progress(first_socket: Path) -> tuple[int, str]:
    """Returns percentage and stage of the slowest shard on this machine.

    first_socket: the socket of one of them; its name ends in `-RANK`. A shard that listens has no file any more.
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
    """Removes the progress file of a shard that has loaded or ended."""
    with contextlib.suppress(OSError):
        progress_file(socket).unlink(missing_ok=True)
