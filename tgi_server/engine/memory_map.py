"""The memory mappings of this process, from /proc/self/smaps."""

import re
from bisect import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ \d+ *(.*)")


@dataclass(slots=True)
class Mapping:
    """A mapping: the addresses from `first` to `last`, which is the end (exclusive).

    path: path of the file, a name in brackets, or empty. offset: offset of the first byte in the file. private: True
    for MAP_PRIVATE. changed: True if this process has written to the pages. huge_pages: True with MADV_HUGEPAGE.
    """

    first: int
    last: int
    private: bool
    writable: bool
    path: str
    offset: int
    changed: bool = False
    huge_pages: bool = False

    @property
    def is_anonymous(self) -> bool:
        return self.private and (not self.path or self.path == "[heap]" or self.path.startswith("[anon"))


class Mappings:
    """A snapshot of the mappings, sorted by address."""

    def __init__(self, lines: Iterable[str]) -> None:
        """lines: lines of /proc/PID/smaps (proc_pid_smaps(5))."""
        self._mappings: list[Mapping] = []
        for line in lines:
            if head := _HEAD.match(line):
                first, last, access, offset, path = head.groups()
                private, writable = access[3] == "p", access[1] == "w"
                mapping = Mapping(int(first, 16), int(last, 16), private, writable, path, int(offset, 16))
                self._mappings.append(mapping)
            elif line.startswith("Anonymous:"):
                self._mappings[-1].changed = int(line.split()[1]) > 0
            elif line.startswith("VmFlags:"):
                self._mappings[-1].huge_pages = "hg" in line.split()
        self._starts = [mapping.first for mapping in self._mappings]

    @classmethod
    def now(cls) -> "Mappings":
        """Returns the current mappings of this process. Raises OSError on systems other than Linux."""
        with Path("/proc/self/smaps").open() as lines:
            return cls(lines)

    def anonymous(self, address: int, size: int) -> Mapping | None:
        """Returns the first mapping of a range of anonymous writable memory; None for other ranges."""
        number = bisect(self._starts, address) - 1
        found, end = None, address
        while 0 <= number < len(self._mappings) and end < address + size:
            mapping = self._mappings[number]
            if not (mapping.is_anonymous and mapping.writable and mapping.first <= end < mapping.last):
                return None
            found, end, number = found or mapping, mapping.last, number + 1
        return found

    def unchanged_file(self, address: int, size: int) -> Path | None:
        """Returns the file that a range is mapped from, unless this process may have changed it; None otherwise."""
        mapping = self._of_file(address, size)
        again = mapping is not None and not mapping.changed and (mapping.private or not mapping.writable)
        return Path(mapping.path) if mapping is not None and again else None

    def offset_in(self, path: str, address: int, size: int) -> int | None:
        """Returns the offset of a range in a file; None if it is not mapped from there."""
        mapping = self._of_file(address, size)
        if mapping is None or mapping.path != path:
            return None
        return mapping.offset + address - mapping.first

    def _of_file(self, address: int, size: int) -> Mapping | None:
        number = bisect(self._starts, address) - 1
        if number < 0 or address + size > self._mappings[number].last:
            return None
        return self._mappings[number] if self._mappings[number].path.startswith("/") else None
