"""The cores and the memory that containers and service managers leave to this process, by control groups (cgroups).

`docker run --cpus 2 --memory 8g`, limits of Kubernetes and `CPUQuota=` of systemd are such groups. A process sees all
of the machine's cores then, and is held up for most of every 100 ms when it computes on more than it may. Versions 1
and 2 of the interface are read (cgroups(7)); a group's limit counts for all groups inside it.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_PROCESS = Path("/proc/self")


def usable_cores(process: Path = _PROCESS) -> int:
    """Returns the number of cores to compute on: the process's affinity, or its quota, rounded up, if less."""
    return max(1, math.ceil(min(cores_of_affinity(), cpu_quota(process))))


def cores_of_affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(process: Path = _PROCESS) -> float:
    """Returns how many cores' time the process's control groups leave it; infinity where there is no limit."""
    quota = math.inf
    for group in _groups("cpu", process):
        limits = _numbers(group / "cpu.max") or [
            *_numbers(group / "cpu.cfs_quota_us"),
            *_numbers(group / "cpu.cfs_period_us"),
        ]
        match limits:
            case [time, period] if time > 0 and period > 0:
                quota = min(quota, time / period)
    return quota


def free_memory(process: Path = _PROCESS) -> int | None:
    """Returns the bytes that the process's control groups let it take yet; None where there is no limit."""
    free = []
    for group in _groups("memory", process):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            match [*_numbers(group / limit), *_numbers(group / used)]:
                case [most, taken]:
                    free.append(most - taken)
    return min(free, default=None)


def available_ram() -> int:
    """Returns the bytes of RAM that this process may still take: of the machine, or of its control groups."""
    import psutil  # which the gRPC service is installed without

    available: int = psutil.virtual_memory().available
    free = free_memory()
    return available if free is None else min(available, free)


def _groups(controller: str, process: Path) -> Iterator[Path]:
    """Yields the folders of the groups that the process is in, from the innermost on, as far as they can be seen."""
    places: dict[str, str] = {}
    for line in _lines(process / "cgroup"):
        _, controllers, place = line.split(":", 2)
        places.update(dict.fromkeys(controllers.split(","), place))
    for line in _lines(process / "mountinfo"):
        mount, _, file_system = line.partition(" - ")
        (root, mount_point), (kind, *_, options) = mount.split()[3:5], file_system.split()
        if kind == "cgroup2":
            key = ""
        elif kind == "cgroup" and controller in options.split(","):
            key = controller
        else:
            continue
        if key in places:
            inside = PurePosixPath(places[key])
            parts = inside.relative_to(root).parts if inside.is_relative_to(root) and ".." not in inside.parts else ()
            yield from (Path(mount_point, *parts[:count]) for count in range(len(parts), -1, -1))


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _numbers(file: Path) -> list[int]:
    """Returns the numbers of a group's file; none where there is no such file, or where it says `max`."""
    try:
        return [int(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        return []
