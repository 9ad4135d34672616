"""Keeps a shard on the cores of one NUMA node (--numa), so that Linux allocates its memory on that node."""

import os
from collections.abc import Sequence
from pathlib import Path

from tgi_server.engine.errors import EngineError

_NODES = Path("/sys/devices/system/node")


def nodes(setting: str, folder: Path = _NODES) -> list[set[int]]:
    """Returns, for each node, the cores that this process may use.

    setting: "auto", or the cores of each node, as in "0-63;64-127". folder: sysfs folder of the nodes, for "auto".

    Raises ValueError if the setting is invalid, or has cores that this process may not use.
    """
    usable = os.sched_getaffinity(0)
    if setting == "auto":
        files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
        found = [cores(file.read_text()) & usable for file in files]
        return [node for node in found if node] or [usable]
    named = [cores(text) for text in setting.split(";")]
    for node in named:
        if not node or node - usable:
            raise ValueError(f"this process may use the cores {_text(usable)}, not all of {setting!r}")
    if sum(map(len, named)) > len(set().union(*named)):
        raise ValueError(f"{setting!r} names a core twice")
    return named


def cores(text: str) -> set[int]:
    """Parses a list of cores in Linux's format, such as "0-3,8". Raises ValueError."""
    found: set[int] = set()
    for item in filter(None, text.strip().split(",")):
        first, _, last = item.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ValueError(f"{text.strip()!r} is not a list of cores, such as 0-3,8")
        found.update(range(int(first), int(last or first) + 1))
    return found


def keep_to_node(setting: str, shard: int, shards: int) -> int:
    """Moves all threads of this process to the cores of its node. Returns the number of shards on these cores.

    shard: index of this shard among the `shards` of this machine. Raises EngineError.
    """
    try:
        found = nodes(setting)
        if shards % len(found):
            raise ValueError(f"{len(found)} nodes need as many shards, or a multiple; --num-shard makes {shards}")
    except ValueError as error:
        raise EngineError(f"--numa: {error}") from error
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), found[shard * len(found) // shards])
    return shards // len(found)


def _text(numbers: Sequence[int] | set[int]) -> str:
    return ",".join(map(str, sorted(numbers)))
